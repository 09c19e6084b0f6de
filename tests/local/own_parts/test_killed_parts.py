"""Holdfast's own processes are killed in the middle of a recovery, again and again."""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

ENDLESS = 10_000_000
KILLS = 20
SECOND_FAULTS = 8
DRILLS = 5
WINDOW_S = 0.35  # a recovery takes 0.1 to 0.3 s


@pytest.fixture(scope="module")
def run(start_shared: Start) -> Iterator[Run]:
    run = start_shared("--members 2 --checkpoint-every 0", "steady.py", ENDLESS)
    yield run
    assert run.stop().code == 130


def test_a_recovery_is_completed_once_from_the_newest_state_if_the_supervisor_is_killed_in_it(
    run: Run,
) -> None:
    chance = random.Random(3)
    before = run.steady()
    for turn in range(KILLS):
        rank, moment_s = turn % 2, chance.uniform(0.0, WINDOW_S)
        found = run.broken(partial(kill_both, run, rank, moment_s))
        assert found["lost_steps"] <= 1, f"turn {turn}, {moment_s:.3f} s after the kill"
        after = run.trains(5)
        assert after["generation"] == before["generation"] + 1, "the run must restart exactly once"
        assert after["incidents"] == before["incidents"] + 1
        assert after["step"] > before["step"]
        before = after


def kill_both(run: Run, rank: int, moment_s: float) -> None:
    """Kill a rank, and `moment_s` later the supervisor."""
    pid = run.running()["supervisor_pid"]
    run.hit(rank, signal.SIGKILL)
    select.select([], [], [], moment_s)
    os.kill(pid, signal.SIGKILL)


def test_a_second_fault_during_a_recovery_is_also_recovered_from(run: Run) -> None:
    chance = random.Random(4)
    run.steady()
    for turn in range(SECOND_FAULTS):
        before = run.trains(5)
        run.hit(turn % 2, signal.SIGKILL)
        select.select([], [], [], chance.uniform(0.0, WINDOW_S))
        run.hit(chance.randrange(2), signal.SIGKILL, whatever=True)
        run.after(before["generation"])
        assert run.trains(5)["step"] >= before["step"]
    assert not any(each["open"] for each in run.incidents())


def test_a_drill_sent_to_a_sidecar_that_has_just_died_is_carried_out_by_its_successor(run: Run) -> None:
    """It used to be lost silently: the order was sent, but no process was there to read it."""
    for _ in range(DRILLS):
        before = run.steady()
        pid = next(member["sidecar_pid"] for member in before["members"] if 0 in member["ranks"])
        os.kill(pid, signal.SIGKILL)
        run.inject("kill", 0)
        run.after(before["generation"])
