"""NaN, Inf and loss jumps are found in their step, rolled back, and named if they recur."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


def test_a_bad_number_is_found_in_its_step_and_rolled_back(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --loss-jump 10", "bad_loss.py", 120, "nan@30,inf@50,jump@80", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    found = run.incidents()
    assert [each["kind"] for each in found] == ["nan", "inf", "loss_jump"]
    for each, step in zip(found, (30, 50, 80), strict=True):
        assert (each["rank"], each["step"], each["remedy"]) == (1, step, "rollback")
        assert each["resume"]["step"] <= step, "the run resumed from a state that contains the bad step"
        assert f"batch position {32 * step}" in each["why"]
    assert [each["lost_steps"] for each in found[:2]] == [0, 0], (
        "the gradients show the bad number before the snapshot is written"
    )


def test_a_bad_gradient_at_a_good_loss_is_rolled_back_before_it_is_written(
    start: Start, tmp_path: Path
) -> None:
    run = start("--nproc-per-node 2 --snapshot-every 0", "bad_loss.py", 120, "gradient@30", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["step"], found["lost_steps"]) == ("nan", 30, 0)
    assert "a gradient that is not finite" in found["why"]


@pytest.mark.parametrize("members", ["--nproc-per-node 2", "--members 2"])
def test_the_snapshot_before_a_pause_can_be_resumed_from_many_steps_later(
    start: Start, tmp_path: Path, members: str
) -> None:
    """Its private states were once dropped too soon: a bad loss ended the run, or cost nearly all steps."""
    run = start(f"{members} --snapshot-every 1000", "bad_loss_after_swap.py", tmp_path / "spoiled")
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["step"], found["resume"]["step"]) == ("nan", 95, 50)


def test_a_batch_that_fails_again_is_named_and_ends_the_run(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2", "bad_loss.py", 120, "nan!@30", tmp_path).finish()
    assert ended.code == 1
    last = ended.lines[-1]
    assert "--skip-bad-batches" in last
    assert "step 30 of rank 1 (batch position 960)" in last


def test_a_batch_that_fails_again_is_skipped_if_that_is_allowed(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --skip-bad-batches", "bad_loss.py", 120, "inf!@40", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert [each["kind"] for each in run.incidents()] == ["inf", "inf"]
    assert run.last_status()["skip"] == [40]
    assert run.last_status()["step"] == 120


@pytest.mark.parametrize("options", ["", "--loss-jump 0"])
def test_a_loss_jump_is_no_fault_by_default(start: Start, tmp_path: Path, options: str) -> None:
    run = start(f"--nproc-per-node 2 {options}", "bad_loss.py", 120, "jump!@80", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert run.incidents() == []
    warned = [line for line in ended.lines if "at step 80" in line and "last 64: median" in line]
    assert len(warned) == (0 if options else 1), ended.output


def test_a_loss_jump_that_recurs_after_its_rollback_is_accepted(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --loss-jump 10", "bad_loss.py", 120, "jump!@80", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["step"]) == ("loss_jump", 80)
    assert "last 64: median" in found["why"]
    assert "limit" in found["why"]
    assert "so it is accepted" in ended.output
