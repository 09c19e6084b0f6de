"""The keeper handles sidecars that run but do nothing. Real processes take their place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.inspection import process_stats
from holdfast.process import event_loop, linux
from supervisor.local import keeper, memory_volume
from supervisor.local.keeper import LocalKeeper, LocalMember
from supervisor.local.keeper_messages import Renew
from supervisor.local.process_specs import RunSpec
from supervisor.local.processes import ManagedProcess, ProcessTable
from tests.local.waiting import until
from tests.sandbox import memory_directory

WAITS = "import threading; print(flush=True); threading.Event().wait()"
POLLS = "import time\nprint(flush=True)\nwhile True: time.sleep(0.05)"
Make = Callable[[str, str], ManagedProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    """Create parts that were started long ago."""
    made: list[subprocess.Popen[bytes]] = []

    def part(name: str, program: str) -> ManagedProcess:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        made.append(process)
        return ManagedProcess(name, process, -1, 0.0)

    yield part
    for each in made:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[LocalKeeper]:
    plan = RunSpec(("train.py",), 1, 0, "auto", tmp_path, tmp_path, {}, ())
    with socket.socket() as api:
        yield LocalKeeper(plan, api)


def is_killed(part: ManagedProcess) -> bool:
    assert isinstance(part.process, subprocess.Popen)
    return part.process.wait(30) == -signal.SIGKILL


def stop(part: ManagedProcess) -> None:
    os.kill(part.process.pid, signal.SIGSTOP)
    until(lambda: process_stats.is_stopped(part.process.pid) or None, "it is stopped", 30.0)


def look(kept: LocalKeeper, *times_s: float) -> None:
    for now_s in times_s:
        kept._replace_stuck_sidecars(now_s)


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
        kept._repair.add("m0")
        kept._repair_volume(0.0)
        for whole in (arena / "records", arena, folder, folder):
            if whole.is_dir():
                shutil.rmtree(whole)
            else:
                whole.unlink()
            for key in event_loop.ready(kept.selector, 30.0):
                key.data()
            assert (arena / "records").read_bytes() == b"here"
        assert "enable-linger" in "".join(kept._repair.repair(1.0))
        kept._repair.close()
        kept._removals.close()
        os.close(owner)


def test_a_sidecar_that_stays_stopped_is_killed(kept: LocalKeeper, make: Make) -> None:
    part = make("sidecar m0", WAITS)
    kept.members["m0"] = LocalMember("m0", make("launcher m0", WAITS), part)
    stop(part)
    look(kept, 100.0, 101.0)
    assert not kept.news, "a job stopped and continued as a whole may look stopped for a moment"
    look(kept, 102.0)
    assert is_killed(part)
    assert kept.news == ["replacing sidecar m0: it is stopped. The ranks keep training"]


def test_a_member_whose_processes_are_all_stopped_is_a_host_that_does_not_run(
    kept: LocalKeeper, make: Make
) -> None:
    member = LocalMember("m0", make("launcher m0", WAITS), make("sidecar m0", WAITS))
    kept.members["m0"] = member
    for part in (member.launcher, member.sidecar):
        assert part is not None
        stop(part)
    look(kept, 100.0, 101.0, 102.0, 103.0)
    assert not kept.news


@pytest.mark.parametrize(("program", "killed"), [(WAITS, True), (POLLS, False)])
def test_an_unresponsive_sidecar_is_killed_if_it_does_nothing_at_all(
    kept: LocalKeeper, make: Make, program: str, killed: bool
) -> None:
    part = make("sidecar m0", program)
    kept.members["m0"] = LocalMember("m0", make("launcher m0", WAITS), part)
    until(lambda: linux.state_of(part.process.pid)[0] == "S" or None, "it waits", 30.0)
    for name in ("m0", "m9"):
        kept._handle(Renew(name))
    look(kept, time.monotonic())
    assert not kept.news
    until(lambda: None if program == POLLS and not _has_run(kept, part) else True, "it has run", 30.0)
    look(kept, time.monotonic() + keeper.IDLE_S)
    assert bool(kept.news) == killed
    assert not killed or is_killed(part)


@pytest.mark.parametrize(("gpus", "told_first"), [(None, True), (0, True), (2, False)])
def test_the_loss_of_a_member_is_reported_before_the_kernel_has_ended_its_ranks(
    kept: LocalKeeper, make: Make, monkeypatch: pytest.MonkeyPatch, gpus: int | None, told_first: bool
) -> None:
    """Ranks with gigabytes take a while to end. The device's memory must be free before it is reused."""
    kept.plan = replace(kept.plan, gpus=gpus)
    member = LocalMember("m0", make("launcher m0", WAITS), make("sidecar m0", WAITS))
    kept.members["m0"] = member
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
    with ours, theirs:
        kept._connection = ours
        part = kept._children.watch("launcher m0", member.launcher.process)
        member.launcher = part
        part.process.kill()
        while not member.gone:
            kept.poll(0.1)
        assert told[0] == told_first
        assert is_killed(member.sidecar)


def _has_run(kept: LocalKeeper, part: ManagedProcess) -> bool:
    return process_stats.sample(part.process.pid).cpu_s > kept._silent[part.process.pid][0]
