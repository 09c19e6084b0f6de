"""A new supervisor reads the previous supervisor's journal, no matter in what state it was left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

ENDLESS = 10_000_000


def append(path: Path, **fields: Any) -> None:
    """Append a copy of the newest line with other `fields`; nothing else writes while the group trains."""
    line = json.loads(path.read_bytes().splitlines()[-1]) | fields
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    "last",
    [
        {"action": "Dismiss", "what": {"why": "the rank made progress"}},
        {"action": "Ponder", "what": {"why": "a later version does this"}},
        {"after": {"phase": "a memory that no version can read"}},
    ],
    ids=["a dismissed hang", "an unknown action", "an unreadable memory"],
)
def test_a_new_supervisor_continues_from_any_last_journal_line(start: Start, last: dict[str, Any]) -> None:
    run = start("--members 2 --checkpoint-every 0", "steady.py", ENDLESS)
    before = run.steady()
    append(run.run_dir / "journal.jsonl", **last)
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    after = run.wait(lambda status: status["supervisor_pid"] != before["supervisor_pid"], "a new supervisor")
    assert after["generation"] == before["generation"]
    found = run.broken(lambda: run.hit(1, signal.SIGKILL))
    assert (found["lost_steps"] <= 1, found["lost_at_least"]) == (True, False)
    assert run.trains(5)["generation"] == before["generation"] + 1
    run.interrupt()
    assert run.finish().code == 130


def kill_all_who_know(status: dict[str, Any]) -> None:
    """Kill the supervisor and all launchers. Stop them first, so that none can pass on what it knows."""
    pids = [status["supervisor_pid"], *(each["launcher_pid"] for each in status["members"])]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, signum)


def test_a_run_whose_supervisor_dies_with_all_members_does_not_silently_start_over(
    start: Start,
) -> None:
    run = start("--members 2 --checkpoint-every 600s", "steady.py", ENDLESS)
    run.steady()
    now = run.reach(60)
    written = run.last_status()["step"]
    kill_all_who_know(now)
    ended = run.finish()
    assert ended.code == 1
    assert "no state is left to resume from: storage has no checkpoint yet" in ended.output
    # Which of the two is printed depends on when the next supervisor learns that they are gone.
    assert "the member is lost" in ended.output or "is lost with its members" in ended.output
    [found] = run.incidents()
    assert found["step"] >= written > 0
    assert run.last_status()["step"] >= written


def test_steps_that_were_lost_together_with_the_supervisor_are_counted(start: Start) -> None:
    run = start("--members 2 --checkpoint-every 1s", "steady.py", ENDLESS)
    run.steady()
    run.wait(lambda status: status["checkpoint"] is not None, "a checkpoint")
    before = run.trains(20)
    written = run.last_status()["step"]
    found = run.broken(lambda: kill_all_who_know(before))
    assert found["resume"]["source"] == "checkpoint"
    assert found["step"] >= written > 0
    assert found["lost_steps"] == max(0, found["step"] - found["resume"]["step"])
    assert found["lost_at_least"], "no process knows the last steps"
    assert run.stop().code == 130


def test_a_run_from_scratch_whose_journal_is_lost_does_not_resume_from_older_states(
    start: Start,
) -> None:
    """A disk that is full at the start has this effect: the line that makes older states void is missing."""
    first = start("--members 2 --checkpoint-every 0", "steady.py", ENDLESS, 64, 2)
    first.steady()
    first.reach(600)
    first.interrupt()
    assert first.finish().code == 130
    run = start("--members 2 --checkpoint-every 0 --from-scratch", "steady.py", ENDLESS, 64, 50)
    before = run.steady()

    def lose_track() -> None:
        os.kill(before["supervisor_pid"], signal.SIGSTOP)
        described = json.loads((run.run_dir / "run.json").read_text())
        os.truncate(run.run_dir / "journal.jsonl", described["journal_bytes"])
        os.kill(before["supervisor_pid"], signal.SIGKILL)

    found = run.broken(lose_track)
    assert (found["kind"], found["resume"]["source"]) == ("lost_track", "slot")
    assert found["resume"]["step"] < 600
    assert found["lost_steps"] <= 1
    assert run.stop().code == 130
