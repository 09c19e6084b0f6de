"""A run that has saved a state never starts over unless the user requests it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run
from tests.samples.checkpoints import scan

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

ENDLESS = 10_000_000
SAVING = "--nproc-per-node 2 --checkpoint-every 1"


def saved(start: Start) -> Run:
    """Return a run that was stopped and left checkpoints."""
    run = start(SAVING, "steady.py", ENDLESS)
    run.steady()
    run.wait(lambda s: s["checkpoint"] and s["checkpoint"]["step"], "a checkpoint")
    run.interrupt()
    assert run.finish().code == 130
    return run


def cut(folder: Path) -> None:
    for manifest in folder.glob("step-*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-40])


def test_a_start_with_only_unusable_checkpoints_fails_unless_it_is_from_scratch(start: Start) -> None:
    run = saved(start)
    folder = run.run_dir / "checkpoints"
    names = [each.path.name for each in scan(folder)]
    cut(folder)
    ended = start(SAVING, "steady.py", ENDLESS).finish()
    assert ended.code == 2
    assert f"checkpoint {names[0]}: manifest.json is truncated" in ended.output
    assert "--from-scratch starts over from step 0" in ended.output
    assert [path.name for path in sorted(folder.glob("step-*"), reverse=True)] == names, (
        "a checkpoint was deleted"
    )
    anew = start(f"{SAVING} --from-scratch", "steady.py", ENDLESS)
    began = anew.steady()
    assert (began["resumed"], began["generation"]) == (None, 2)
    anew.stop()


def test_a_start_also_fails_if_the_checkpoints_are_gone(start: Start) -> None:
    run = saved(start)
    shutil.rmtree(run.run_dir / "checkpoints")
    ended = start(SAVING, "steady.py", ENDLESS).finish()
    assert ended.code == 2
    assert "no checkpoint left, although step" in ended.output


def test_from_scratch_makes_older_checkpoints_void_once_there_is_a_new_one(start: Start) -> None:
    run = saved(start)
    folder = run.run_dir / "checkpoints"
    anew = start(f"{SAVING} --from-scratch", "steady.py", ENDLESS)
    first = anew.wait(lambda s: s["generation"] == 2 and s["checkpoint"], "a new checkpoint")
    assert first["resumed"] is None
    anew.interrupt()
    assert anew.finish().code == 130
    left = scan(folder)
    assert {each.generation for each in left} == {2}, "void checkpoints of the older generation are left"
    again = start(SAVING, "steady.py", ENDLESS)
    resumed = again.wait(lambda s: s["resumed"], "a generation that has resumed")["resumed"]
    assert resumed["step"] == left[0].step
    again.stop()


def test_a_run_from_scratch_that_is_stopped_before_its_first_step_keeps_older_checkpoints(
    start: Start,
) -> None:
    run = saved(start)
    before = scan(run.run_dir / "checkpoints")
    for stop in (Run.interrupt, Run.kill):
        anew = start(f"{SAVING} --from-scratch", "steady.py", ENDLESS, 64, 1_000_000)
        anew.wait(lambda s: s["phase"] == "running" and s["step"] == 0, "the first step")
        stop(anew)
        if stop is Run.interrupt:
            assert anew.finish().lines[-1].startswith("holdfast: stopped as requested, before the first step")
        assert scan(run.run_dir / "checkpoints") == before
    again = start(f"{SAVING} --resume", "steady.py", ENDLESS)
    resumed = again.wait(lambda s: s["resumed"], "a generation that has resumed")["resumed"]
    assert resumed["step"] == before[0].step
    again.stop()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over_with_a_message(start: Start) -> None:
    first = start("--checkpoint-every 600", "steady.py", ENDLESS)
    first.reach(20)
    first.kill()
    for times in (1, 2):  # the second one's predecessor was killed before it did a step
        again = start("--checkpoint-every 600 --resume", "steady.py", ENDLESS)
        again.wait(lambda s: s["phase"] == "forming", "the group forms")
        again.kill()
        said = [line for line in again.output().splitlines() if "had reached step" in line]  # by all runs
        assert len(said) == times
        assert said[-1].endswith("there is nothing to resume from, so training starts at step 0")


def test_new_checkpoints_supersede_old_ones_although_the_journal_is_lost(start: Start) -> None:
    run = saved(start)
    folder = run.run_dir / "checkpoints"
    (run.run_dir / "journal.jsonl").unlink()
    before = scan(folder)[0]
    again = start(SAVING, "steady.py", ENDLESS)
    found = again.wait(
        lambda s: s["checkpoint"] and (s["checkpoint"]["step"] or 0) > before.step, "a newer checkpoint"
    )
    assert found["generation"] > before.generation
    assert found["resumed"]["step"] == before.step
    again.stop()


def test_the_loss_of_the_only_member_before_any_checkpoint_ends_the_run(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", ENDLESS)
    run.steady()
    run.wait(lambda s: (s["step"] or 0) > (s["snapshot_step"] or 0) >= 0 and s["step"] > 10, "a snapshot")
    run.inject("member")
    ended = run.finish()
    assert ended.code == 1
    assert "storage has no checkpoint yet" in ended.output
    described = json.loads((run.run_dir / "status.json").read_text())
    assert described["exit_code"] == 1
