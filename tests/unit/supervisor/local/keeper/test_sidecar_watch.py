"""The keeper replaces sidecars that run but do nothing. Real processes take their place."""

from __future__ import annotations

import os
import signal
import time

import pytest

from holdfast.inspection import process_stats
from holdfast.process import linux
from supervisor.local.keeper.members import LocalMember
from supervisor.local.keeper.processes import ManagedProcess
from supervisor.local.keeper.sidecar_watch import IDLE_S, SidecarWatch
from tests.local.waiting import until
from tests.unit.supervisor.local.keeper.parts import WAITS, Make, is_killed

POLLS = "import time\nprint(flush=True)\nwhile True: time.sleep(0.05)"


def stop(part: ManagedProcess) -> None:
    os.kill(part.process.pid, signal.SIGSTOP)
    until(lambda: process_stats.is_stopped(part.process.pid) or None, "it is stopped", 30.0)


def watched() -> tuple[SidecarWatch, list[str]]:
    """Return a watch, and the list of its lines for the user."""
    said: list[str] = []
    return SidecarWatch(said.append), said


def look(watch: SidecarWatch, members: list[LocalMember], *times_s: float) -> None:
    for now_s in times_s:
        watch.replace_stuck(members, now_s)


def test_a_sidecar_that_stays_stopped_is_killed(make: Make) -> None:
    watch, said = watched()
    part = make("sidecar m0", WAITS)
    members = [LocalMember("m0", make("launcher m0", WAITS), part)]
    stop(part)
    look(watch, members, 100.0, 101.0)
    assert not said, "a job stopped and continued as a whole may look stopped for a moment"
    look(watch, members, 102.0)
    assert is_killed(part)
    assert said == ["replacing sidecar m0: it is stopped. The ranks keep training"]


def test_a_member_whose_processes_are_all_stopped_is_a_host_that_does_not_run(make: Make) -> None:
    watch, said = watched()
    member = LocalMember("m0", make("launcher m0", WAITS), make("sidecar m0", WAITS))
    for part in (member.launcher, member.sidecar):
        assert part is not None
        stop(part)
    look(watch, [member], 100.0, 101.0, 102.0, 103.0)
    assert not said


@pytest.mark.parametrize(("program", "killed"), [(WAITS, True), (POLLS, False)])
def test_an_unresponsive_sidecar_is_killed_if_it_does_nothing_at_all(
    make: Make, program: str, killed: bool
) -> None:
    watch, said = watched()
    part = make("sidecar m0", program)
    members = [LocalMember("m0", make("launcher m0", WAITS), part)]
    until(lambda: linux.state_of(part.process.pid)[0] == "S" or None, "it waits", 30.0)
    watch.note_silence(members[0], time.monotonic())
    look(watch, members, time.monotonic())
    assert not said
    until(lambda: None if program == POLLS and not _has_run(watch, part) else True, "it has run", 30.0)
    look(watch, members, time.monotonic() + IDLE_S)
    assert bool(said) == killed
    assert not killed or is_killed(part)


def _has_run(watch: SidecarWatch, part: ManagedProcess) -> bool:
    return process_stats.sample(part.process.pid).cpu_s > watch._silent[part.process.pid][0]
