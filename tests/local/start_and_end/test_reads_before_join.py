"""A file that a script reads before joining may be missing for a moment, even when a process needs it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


def error(status: dict[str, Any]) -> str:
    """Return why no warm process can be started, or "" if one can."""
    return str(status["members"][0]["warm_error"])


def tries(run: Run) -> int:
    return len(list((run.run_dir / "logs" / "warm").glob("*.log")))


def test_a_file_that_is_missing_for_a_moment_prevents_no_recovery(start: Start, tmp_path: Path) -> None:
    there, away = tmp_path / "data.txt", tmp_path / "away.txt"
    there.write_text("data")
    run = start("--nproc-per-node 2", "reads_before_join.py", there)
    run.steady(30)
    there.rename(away)
    run.broken(lambda: run.hit(1, signal.SIGKILL))
    found = run.wait(error, "no warm process can be started")
    assert found["warnings"] == [error(found)]
    assert "FileNotFoundError" in error(found)
    assert "(reads_before_join.py, line 10); a fault now requires a cold start" in error(found)
    tried = tries(run)
    run.wait(lambda _: tries(run) >= tried + 4, "tried beyond the third time")
    run.hit(0, signal.SIGKILL)
    run.wait(lambda _: "the ranks wait for them" in run.output(), "a fault, and the screen says so")
    away.rename(there)
    cold = run.recovered(2)
    assert (cold["lost_steps"], cold["resume"]["source"]) == (0, "slot")
    run.steady()
    run.wait(lambda _: "are available again" in run.output(), "the screen says so")
    warm = "holdfast: warm processes for member m0"
    said = [line for line in run.output().splitlines() if line.startswith(warm)]
    assert said[0] == f"holdfast: {error(found)}"
    assert said[-1] == f"{warm} are available again"
    assert run.stop().code == 130
