"""Changes that a script makes to protected state after a commit survive faults, stops and checkpoints."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.snapshot.arena import Arena
from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

LONE = ["first", "second"]  # one member's rank changes its private state; schedulers always step
KINDS = ["shared", "both", "average", "often", *LONE]


def options(what: str) -> str:
    """Make a snapshot due at each change of the state; for `LONE`, none is due from then until the fault."""
    return f"--members 2 --hang-floor 60s --snapshot-every {32 if what in LONE else 20}"


def held(what: str) -> int:
    """Return the step at which the run is held; for `LONE`, it is twelve steps after the change."""
    return 44 if what in LONE else 45


def result(folder: Path) -> list[Any]:
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found = {}
    for what in KINDS:
        folder = tmp_path_factory.mktemp(what)
        ended = start_shared(options(what), "changes_after_commit.py", folder, what, into=what).finish()
        assert ended.code == 0, ended.output
        found[what] = result(folder)
    return found


def evaluating(run: Run, folder: Path) -> None:
    run.running()
    until(lambda: all((folder / f"begun.{r}").exists() for r in (0, 1)) or None, "all evaluate", WAIT_S)


@pytest.mark.parametrize("what", KINDS)
def test_a_rank_that_dies_during_the_evaluation_loses_no_change(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    run = start(options(what), "changes_after_commit.py", tmp_path, what)
    evaluating(run, tmp_path)
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed[what]


@pytest.mark.parametrize("what", KINDS)
def test_a_stop_during_the_evaluation_loses_no_change(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    run = start(options(what), "changes_after_commit.py", tmp_path, what)
    evaluating(run, tmp_path)
    run.interrupt()
    stopped = run.finish()
    assert stopped.code == 130, stopped.output
    ended = start(
        f"{options(what)} --run-dir {run.run_dir}", "changes_after_commit.py", tmp_path, what
    ).finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed[what]


@pytest.mark.parametrize("what", KINDS)
def test_a_snapshot_due_at_the_change_contains_it_or_is_not_used(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    """All ranks die at once, so none is left to copy its state."""
    run = start(options(what), "changes_after_commit.py", tmp_path, what, "hold")
    run.reach(held(what))
    run.kill_ranks(0, 1)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed[what]


@pytest.mark.parametrize("what", KINDS)
def test_a_checkpoint_due_at_the_change_contains_it_or_is_not_written(
    start: Start, tmp_path: Path, undisturbed: dict[str, list[Any]], what: str
) -> None:
    run = start(f"{options(what)} --checkpoint-every 1s", "changes_after_commit.py", tmp_path, what, "hold")
    there = run.reach(held(what))
    if what in LONE:  # the member that saves may hold only snapshots that the other's rank has made void
        run.wait(lambda status: status["total_s"] > there["total_s"] + 3.0, "the intervals are over")
    else:
        run.wait(lambda status: status["checkpoint"] and status["checkpoint"]["step"] >= 20, "a checkpoint")
    run.stop()  # immediately, without a last checkpoint
    ended = start(
        f"{options(what)} --run-dir {run.run_dir}", "changes_after_commit.py", tmp_path, what
    ).finish()
    assert ended.code == 0, ended.output
    assert "from step" in ended.output or what in LONE
    assert result(tmp_path) == undisturbed[what]


def test_few_snapshots_are_taken_if_every_step_becomes_void(start: Start, tmp_path: Path) -> None:
    run = start("--members 2 --snapshot-every 16", "changes_after_commit.py", tmp_path, "always", "hold")
    run.steady()
    run.reach(130)
    assert run.runtime is not None
    for member in ("m0", "m1"):
        arena = Arena(run.runtime / member / "arena")
        written = max(each.sequence for each in arena.records())
        arena.close()
        assert written <= 130 // 16 + 12, f"{member}: the due snapshots, and a few at the beginning"
    found = run.broken(lambda: run.kill_ranks(0, 1))
    assert found["resume"]["step"] == 128, "private state can change after each commit"
    assert run.finish().code == 0


def test_each_member_has_a_snapshot_although_each_due_one_is_void_for_one_rank(
    start: Start, tmp_path: Path
) -> None:
    """The rank's own member copies the next step; the other copies the step at which it learns of this."""
    given = f"{options('each')} --snapshot-every 64"
    assert start(given, "changes_after_commit.py", tmp_path, "each", into="undisturbed").finish().code == 0
    undisturbed = result(tmp_path)
    run = start(given, "changes_after_commit.py", tmp_path, "each", "hold", into="broken")
    run.steady()
    run.reach(232)
    assert run.runtime is not None
    own, other = (Arena(run.runtime / member / "arena") for member in ("m0", "m1"))
    until(lambda: 193 in own.steps() or None, "m0 has the next step", WAIT_S)
    until(lambda: any(step > 64 and step % 64 for step in other.steps()) or None, "m1 has another", WAIT_S)
    own.close()
    other.close()
    found = run.broken(lambda: run.kill_ranks(0, 1))
    assert found["resume"]["step"] >= 193, found
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert result(tmp_path) == undisturbed


def test_a_step_that_another_rank_has_just_made_void_replaces_no_good_snapshot(
    start: Start, tmp_path: Path
) -> None:
    """Rank 0 copies the next step before the sidecar has dropped the void one, which is not worth keeping."""
    given = "--nproc-per-node 2 --hang-floor 60s --snapshot-every 8"
    assert start(given, "changes_after_commit.py", tmp_path, "quick", into="undisturbed").finish().code == 0
    undisturbed = result(tmp_path)
    run = start(given, "changes_after_commit.py", tmp_path, "quick", "hold", into="broken")
    run.running()
    until(lambda: all((tmp_path / f"held.{r}").exists() for r in (0, 1)) or None, "both are there", WAIT_S)
    found = run.broken(lambda: run.hit(1, signal.SIGKILL))
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert found["resume"]["step"] not in (8, 16, 24), found
    assert result(tmp_path) == undisturbed
