"""Protected state that a script changes after a commit survives faults, stops and checkpoints there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

OPTIONS = "--members 2 --hang-floor 60s --snapshot-every 20"  # each snapshot is due where it is changed
KINDS = ["shared", "both", "average", "often", "first", "second"]
HELD = 52  # more than eight steps after the evaluation: changes that all copies have come after it


def result(folder: Path) -> list[Any]:
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found = {}
    for what in KINDS:
        folder = tmp_path_factory.mktemp(what)
        ended = start_shared(OPTIONS, "afterwards.py", folder, what, into=what).finish()
        assert ended.code == 0, ended.output
        found[what] = result(folder)
    return found


def evaluating(run: Run, folder: Path) -> None:
    run.running()
    until(lambda: all((folder / f"begun.{r}").exists() for r in (0, 1)) or None, "all evaluate", WAIT_S)


@pytest.mark.parametrize("what", KINDS)
def test_a_rank_that_dies_in_the_evaluation_costs_no_change(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    run = start(OPTIONS, "afterwards.py", tmp_path, what)
    evaluating(run, tmp_path)
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed[what]


@pytest.mark.parametrize("what", KINDS)
def test_a_stop_in_the_evaluation_costs_no_change(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    run = start(OPTIONS, "afterwards.py", tmp_path, what)
    evaluating(run, tmp_path)
    run.interrupt()
    stopped = run.finish()
    assert stopped.code == 130, stopped.output
    ended = start(f"{OPTIONS} --run-dir {run.run_dir}", "afterwards.py", tmp_path, what).finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed[what]


@pytest.mark.parametrize("what", KINDS)
def test_a_snapshot_that_is_due_there_has_the_change_or_is_none(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    """All ranks die at once: nobody is left to copy its state."""
    run = start(OPTIONS, "afterwards.py", tmp_path, what, "hold")
    run.reach(HELD)
    run.kill_ranks(0, 1)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed[what]


@pytest.mark.parametrize("what", KINDS)
def test_a_checkpoint_that_is_due_there_has_the_change_or_is_none(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    run = start(f"{OPTIONS} --checkpoint-every 1s", "afterwards.py", tmp_path, what, "hold")
    held = run.reach(HELD)
    if what == "second":  # the member that saves holds snapshots only of what the other's rank has made void
        run.wait(lambda status: status["total_s"] > held["total_s"] + 3.0, "the intervals are over")
    else:
        run.wait(lambda status: status["checkpoint"] and status["checkpoint"]["step"] >= 20, "a checkpoint")
    run.stop()  # at once: without a last one
    ended = start(f"{OPTIONS} --run-dir {run.run_dir}", "afterwards.py", tmp_path, what).finish()
    assert ended.code == 0, ended.output
    assert "from step" in ended.output or what == "second"
    assert result(tmp_path) == undisturbed[what]
