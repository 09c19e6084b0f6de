"""The memory volume refuses what a recovery needs, or loses the run's folder: no state is given up for it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


def blocked(run: Run, member: str) -> Path:
    """Let the member's volume take no more private states: nothing can be made below a file."""
    assert run.runtime is not None
    path = run.runtime / member / "restore"
    shutil.rmtree(path, ignore_errors=True)
    path.write_bytes(b"")
    return path


def test_a_volume_that_refuses_for_a_while_costs_no_steps_and_one_that_goes_on_is_named(start: Start) -> None:
    run = start("--members 2 --checkpoint-every 0", "steady.py", 10_000_000)
    run.steady(20)
    path = blocked(run, "m1")
    run.hit(1, signal.SIGKILL)

    def refused() -> Json | None:
        return next((each for each in run.incidents() if each["kind"] == "restore"), None)

    first = until(refused, lambda: f"a try is refused\n{run.report()}", WAIT_S)
    assert "the memory volume /" in first["faults"][0]["detail"]
    path.unlink()
    run.trains()
    last = run.incidents()[-1]
    assert (last["resume"]["source"], last["lost_steps"]) == ("slot", 0), run.report()
    known = len(run.incidents())
    blocked(run, "m1")
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 1
    assert "the memory volume /" in ended.output
    assert "tried 3 times. Nothing is wrong with the state" in ended.output
    assert len(run.incidents()) - known <= 4, "the fault, and each try"
