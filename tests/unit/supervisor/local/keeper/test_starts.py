"""Failed starts are repeated later, and the user hears of them once."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.local.keeper.processes import ManagedProcess
from supervisor.local.keeper.restarts import LOOP, RestartKey
from supervisor.local.keeper.starts import NEW_MEMBER, SUPERVISOR, Starts


def starts() -> tuple[Starts, list[str]]:
    """Return starts, and the list of their lines for the user."""
    said: list[str] = []
    return Starts(said.append, lambda name: Path(f"{name}.log")), said


def dead(name: str, code: int) -> ManagedProcess:
    """Return a process that started just now and has already ended with `code`."""
    process: Any = SimpleNamespace(pid=1, returncode=code)
    return ManagedProcess(name, process, -1, time.monotonic())


def test_a_part_that_cannot_be_started_is_reported_once_and_tried_again_later() -> None:
    tried, said = starts()

    def fails() -> None:
        raise OSError(11, "no process is left")

    for _ in range(3):
        assert not tried.attempt(SUPERVISOR, fails)
    [line] = said
    assert line.startswith("supervisor cannot be started: [Errno 11] no process is left; trying again in ")
    assert tried.waits(SUPERVISOR)
    assert tried.pop_due(time.monotonic() + 3600.0) == (SUPERVISOR,)
    assert not tried.waits(SUPERVISOR)
    assert tried.attempt(SUPERVISOR, lambda: None)


@pytest.mark.parametrize(
    ("part", "without"),
    [
        (SUPERVISOR, "supervisor, but until it restarts, the run cannot recover from faults"),
        (RestartKey("sidecar", "m0"), "sidecar m0, but until it restarts, its member is not supervised"),
    ],
)
def test_a_part_that_keeps_failing_is_reported_with_the_consequence(part: RestartKey, without: str) -> None:
    tried, said = starts()
    for _ in range(LOOP + 2):
        tried.died(part, dead(part.name, 3))
    assert len(said) == 2
    assert said[0].startswith(f"{part.name} has ended 3 times in a row, last with code 3 (see logs/")
    assert said[1] == f"the ranks keep training without {without}"


def test_a_part_that_is_killed_from_outside_has_not_failed() -> None:
    tried, said = starts()
    for _ in range(LOOP + 2):
        tried.died(SUPERVISOR, dead("supervisor", -9))
    assert said == []
    assert tried.waits(SUPERVISOR)


def test_launchers_that_keep_failing_delay_the_next_member() -> None:
    tried, said = starts()
    for _ in range(LOOP + 2):
        tried.launcher_failed(dead("launcher m0", 1))
    [line] = said
    assert line.startswith("a member's launcher has ended 3 times in a row, last with code 1 (see logs/")
    assert tried.waits(NEW_MEMBER)
