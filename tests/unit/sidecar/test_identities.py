"""Sidecar and ranks share a member's folder in a pod's memory volume, whichever users they are."""

from __future__ import annotations

import asyncio
import mmap
import os
import selectors
from pathlib import Path

import pytest

from holdfast.launcher.sidecar_server import SidecarServer
from holdfast.protocol import progress_writer
from holdfast.protocol.launcher_messages import LauncherState
from holdfast.snapshot.private_store import PrivateReader, PrivateStore
from sidecar.clients import LauncherClient
from tests.unit.sidecar import memory
from tests.unit.users import Identity, kubelet_volume, needs_root

LIMIT_S = 20.0
ROOT, IMAGE, NAMED = Identity(0, 0), Identity(65532, 65532), Identity(1000, 1000)
RANDOM, GROUPS = Identity(1000650000, 0, (1000650000,)), Identity(70000, 0, (4000,))
IDENTITIES = (ROOT, IMAGE, NAMED, RANDOM, GROUPS)
PAIRS = [
    pytest.param(sidecar, ranks, id=f"sidecar {sidecar}, ranks {ranks}")
    for sidecar in (ROOT, IMAGE, NAMED, RANDOM)
    for ranks in IDENTITIES
]
STATE = LauncherState(7, 1, (), (0,), 4000)

pytestmark = needs_root


def trains(path: Path) -> None:
    """Write what a rank writes: a page, a snapshot and a private state."""
    memory.holdings(path)
    progress_writer.make(path / "page-0.bin")
    progress_writer.map_writable(path / "page-0.bin").close()
    memory.snapshot(path, 1, 5)
    memory.private(path, 0, 1, 5)


def protects(path: Path) -> None:
    """Do what a sidecar does with a rank's files: read, seal and discard them, and store fetched states."""
    held = memory.holdings(path)
    with open(path / "page-0.bin", "rb") as file:
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
    record = held.record(1, 5)
    assert record is not None
    held.arena.seal(record)
    assert held.good(record)
    private = held.private(0, 1, 5)
    assert private is not None
    held.keep_restored(0, 2, 5, private.data)
    memory.snapshot(path, 2, 6)  # a snapshot that it has fetched from a peer
    held.arena.forget(record)


def resumes(path: Path) -> None:
    """Start from the states that the sidecar has stored, and replace them."""
    held = memory.holdings(path)
    record = held.record(2, 6)
    assert record is not None
    assert held.good(record)
    (restored,) = (path / "restore").iterdir()
    assert restored.read_bytes() == b"own"
    memory.snapshot(path, 2, 7)
    store = PrivateStore(path / "arena" / "private-00000.bin", 0)
    store.put(2, 7, b"x" * 100_000)  # so large that the store is replaced
    store.close()


def tidies(path: Path) -> None:
    held = memory.holdings(path)
    held.forget_restored(frozenset())
    assert PrivateReader(path / "arena" / "private-00000.bin").get(7) is not None
    assert held.record(2, 7) is not None


@pytest.mark.parametrize(("sidecar", "ranks"), PAIRS)
@pytest.mark.parametrize("sidecar_first", [True, False], ids=["the sidecar is first", "the ranks are first"])
@pytest.mark.parametrize("mode", [0o1777, 0o2777], ids=["sticky", "with fsGroup"])
def test_states_pass_between_ranks_and_sidecar_in_both_directions(
    sidecar: Identity, ranks: Identity, sidecar_first: bool, mode: int
) -> None:
    with kubelet_volume(mode) as volume:
        if sidecar_first:
            assert sidecar.run(lambda: memory.holdings(volume)) == 0
        assert ranks.run(lambda: trains(volume)) == 0
        assert sidecar.run(lambda: protects(volume)) == 0
        assert ranks.run(lambda: resumes(volume)) == 0
        assert sidecar.run(lambda: tidies(volume)) == 0


def launches(path: Path, ready: int) -> None:
    """Listen as a launcher, and send the state until the sidecar disconnects."""
    selector = selectors.DefaultSelector()
    server = SidecarServer(path, selector, lambda _: None)
    server.open()
    os.write(ready, b"1")
    was_connected = False
    while not was_connected or server.is_connected:
        found = selector.select(LIMIT_S)
        assert found
        for key, _ in found:
            key.data()
        was_connected = was_connected or server.is_connected
        server.send_state(STATE)
    server.close()


async def hears(path: Path) -> None:
    changed = asyncio.Event()
    link = LauncherClient(path, changed.set)
    running = asyncio.create_task(link.run())
    await asyncio.wait_for(changed.wait(), LIMIT_S)
    assert link.state == STATE
    running.cancel()


@pytest.mark.parametrize(("sidecar", "ranks"), PAIRS)
def test_a_sidecar_hears_a_launcher_of_any_user(sidecar: Identity, ranks: Identity) -> None:
    with kubelet_volume() as volume:
        path = volume / "launcher.sock"
        begun, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ranks.assume()
                launches(path, ready)
                status = 0
            finally:
                os._exit(status)
        os.close(ready)
        assert os.read(begun, 1) == b"1"
        os.close(begun)
        assert sidecar.run(lambda: asyncio.run(hears(path))) == 0
        assert os.waitpid(pid, 0)[1] == 0


def test_the_folder_of_a_local_run_stays_closed_to_other_users(capfd: pytest.CaptureFixture[str]) -> None:
    with kubelet_volume(0o755) as run:
        os.chown(run, NAMED.user, NAMED.group)

        def begin() -> None:
            (run / "m0").mkdir(mode=0o700)
            trains(run / "m0")
            server = SidecarServer(run / "m0" / "launcher.sock", selectors.DefaultSelector(), lambda _: None)
            server.open()

        assert NAMED.run(begin) == 0
        (run / "m0").chmod(0o755)  # even if the folder itself were open
        for place in ("arena/records", "arena/slot-0.safetensors", "launcher.sock"):
            assert not (run / "m0" / place).stat().st_mode & 0o077, place


def test_a_sidecar_without_access_says_which_users_are_concerned() -> None:
    with kubelet_volume(0o755) as folder:
        os.chown(folder, NAMED.user, NAMED.group)
        path = folder / "launcher.sock"

        def listen() -> None:
            SidecarServer(path, selectors.DefaultSelector(), lambda _: None).open()

        async def fail() -> None:
            changed = asyncio.Event()
            link = LauncherClient(path, changed.set)
            running = asyncio.create_task(link.run())
            await changed.wait()
            running.cancel()
            said = (
                f"the sidecar cannot connect to {path}: Permission denied (this process is user 65532, but"
                f" {path} belongs to user 1000 and group 1000, with mode 0600)"
            )
            assert link.unreachable == said, link.unreachable

        assert NAMED.run(listen) == 0
        assert IMAGE.run(lambda: asyncio.run(asyncio.wait_for(fail(), LIMIT_S))) == 0
