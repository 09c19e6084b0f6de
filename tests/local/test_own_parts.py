"""Our own parts die too: in the middle of a recovery, again and again."""

from __future__ import annotations

import os
import random
import select
import signal

import pytest

from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

KILLS = 20
WINDOW_S = 0.35  # a recovery takes 0.1 to 0.3 s


def test_a_supervisor_killed_in_a_recovery_never_leaves_it_stuck_doubled_or_older(start: Start) -> None:
    run = start("--members 2 --checkpoint-every 0", "steady.py", 10_000_000)
    chance = random.Random(3)
    before = run.steady()
    for turn in range(KILLS):
        step, generation, count = before["step"], before["generation"], before["incidents"]
        rank = turn % 2
        moment = chance.uniform(0.0, WINDOW_S)
        run.broken(lambda rank=rank, moment=moment: kill_both(run, rank, moment))  # type: ignore[misc]
        after = run.running()
        assert after["generation"] == generation + 1, "neither stuck nor doubled"
        assert after["incidents"] == count + 1
        assert run.incidents()[-1]["lost_steps"] <= 1, f"turn {turn}, {moment:.3f} s after the kill"
        assert after["step"] >= step
        before = run.trains(5)
    assert run.stop().code == 130


def kill_both(run: Run, rank: int, moment_s: float) -> None:
    """Kill a rank, and `moment_s` later the supervisor."""
    pid = run.wait(lambda s: s["supervisor_pid"], "a supervisor")["supervisor_pid"]
    run.hit(rank, signal.SIGKILL)
    select.select([], [], [], moment_s)
    os.kill(pid, signal.SIGKILL)
