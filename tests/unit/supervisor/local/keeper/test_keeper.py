"""The keeper restores its memory, and handles idle sidecars and lost members. Its parts are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from holdfast.process import linux, selector_loop
from supervisor.local.keeper.keeper import LocalKeeper
from supervisor.local.keeper.members import LocalMember
from supervisor.local.keeper.process_specs import RunSpec
from supervisor.local.keeper.processes import ProcessTable
from supervisor.local.keeper.sidecar_watch import IDLE_S
from supervisor.local.keeper_messages import Renew
from supervisor.local.volume import memory_volume, volume_guard
from tests.local.waiting import until
from tests.sandbox import memory_directory
from tests.unit.supervisor.local.keeper.parts import WAITS, Make, is_killed


def test_removed_files_of_the_runs_memory_are_restored_before_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with memory_directory() as root, socket.socket() as api:
        monkeypatch.setattr(memory_volume, "_ROOTS", (root,))
        folder, owner = memory_volume.create()
        kept = LocalKeeper(RunSpec(("train.py",), 1, 0, "auto", folder, folder, {}, ()), api)
        arena = folder / "m0" / "arena"
        arena.mkdir(parents=True, mode=0o700)
        (arena / "records").write_bytes(b"here")
        kept._watch_volume()
        kept._volume.repair.add("m0")
        assert not kept._volume.check(volume_guard.REPAIR_S)
        for whole in (arena / "records", arena, folder, folder):
            if whole.is_dir():
                shutil.rmtree(whole)
            else:
                whole.unlink()
            for key in selector_loop.ready(kept.selector, 30.0):
                key.data()
            assert (arena / "records").read_bytes() == b"here"
        assert "enable-linger" in "".join(kept._volume.repair.repair(1.0))
        kept._volume.close()
        os.close(owner)


def test_a_request_to_renew_a_sidecar_that_does_nothing_replaces_it(tmp_path: Path, make: Make) -> None:
    with socket.socket() as api:
        kept = LocalKeeper(RunSpec(("train.py",), 1, 0, "auto", tmp_path, tmp_path, {}, ()), api)
        part = make("sidecar m0", WAITS)
        kept._members.by_name["m0"] = LocalMember("m0", make("launcher m0", WAITS), part)
        until(lambda: linux.state_of(part.process.pid)[0] == "S" or None, "it waits", 30.0)
        for name in ("m0", "m9"):
            kept._handle(Renew(name))
        kept._watch(time.monotonic() + IDLE_S, 0.0)
        assert kept.news == [
            "replacing sidecar m0: it sends no reports and uses no CPU time. The ranks keep training"
        ]
        assert is_killed(part)


@pytest.mark.parametrize(("gpus", "told_first"), [(None, True), (0, True), (2, False)])
def test_the_loss_of_a_member_is_reported_before_the_kernel_has_ended_its_ranks(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, gpus: int | None, told_first: bool
) -> None:
    """Ranks with gigabytes take a while to end. The device's memory must be free before it is reused."""
    member = LocalMember("m0", make("launcher m0", WAITS), make("sidecar m0", WAITS))
    assert member.launcher is not None
    assert member.sidecar is not None
    ours, theirs = socket.socketpair()
    told: list[bool] = []

    def sweep(_: object) -> None:
        theirs.setblocking(False)
        try:
            told.append("m0" not in json.loads(theirs.recv(1 << 16))["members"])
        except BlockingIOError:
            told.append(False)

    monkeypatch.setattr(ProcessTable, "sweep", sweep)
    monkeypatch.setattr(ProcessTable, "_kill_strays", lambda _: None)  # other tests have children here too
    with ours, theirs, socket.socket() as api:
        kept = LocalKeeper(RunSpec(("train.py",), 1, gpus, "auto", tmp_path, tmp_path, {}, ()), api)
        kept._members.by_name["m0"] = member
        kept._supervisor.connect(ours)
        part = kept._children.watch("launcher m0", member.launcher.process)
        member.launcher = part
        part.process.kill()
        while not member.gone:
            kept.poll(0.1)
        assert told[0] == told_first
        assert is_killed(member.sidecar)
