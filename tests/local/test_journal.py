"""A supervisor reads what the one before it wrote, whatever that was."""

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
    """Append the newest line once more, with other `fields`; the group trains, so nobody else writes."""
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
def test_a_supervisor_that_follows_one_goes_on_from_any_last_line(start: Start, last: dict[str, Any]) -> None:
    run = start("--members 2 --checkpoint-every 0", "steady.py", ENDLESS)
    before = run.steady()
    append(run.run_dir / "journal.jsonl", **last)
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    after = run.wait(lambda status: status["supervisor_pid"] != before["supervisor_pid"], "a new supervisor")
    assert after["generation"] == before["generation"]
    found = run.broken(lambda: run.hit(1, signal.SIGKILL))
    assert found["lost_steps"] <= 1
    assert run.trains(5)["generation"] == before["generation"] + 1
    run.interrupt()
    assert run.finish().code == 130
