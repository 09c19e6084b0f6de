"""A rank that hangs while it copies its state holds the slot that the recovery of its member needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("how", "places"),
    [("stopped", "--members 2"), ("stopped", "--nproc-per-node 2"), ("stuck", "--nproc-per-node 2")],
    ids=["alone on its member", "with a survivor", "with a survivor, alive"],
)
def test_a_hang_during_a_copy_costs_at_most_one_step(
    start: Start, how: str, places: str, tmp_path: Path
) -> None:
    order = tmp_path / "freeze"
    run = start(f"{places} --snapshot-every 16 --checkpoint-every 0", "hangs_in_copy.py", order, how)
    run.steady(30)
    found = run.broken(order.touch)
    assert (found["kind"], found["rank"]) == ("hang", 0), found["why"]
    assert found["lost_steps"] <= 1, found
    assert len(run.incidents()) == 1
    assert run.stop().code == 130


def test_a_slow_copy_is_no_hang(start: Start, tmp_path: Path) -> None:
    """The time of the copy counts as Holdfast's time, not as time of the copying or the waiting rank."""
    order = tmp_path / "freeze"
    run = start("--members 2 --snapshot-every 16 --checkpoint-every 0", "hangs_in_copy.py", order, "slow")
    run.steady(30)
    order.touch()
    run.wait(lambda status: any(each["phase"] == "snapshot" for each in status["ranks"]), "a copy")
    held = run.wait(lambda status: (status["no_step_s"] or 0) > 1, "rank 1 is late")
    assert held["waiting_for"] == "rank 0 is copying its state for Holdfast"
    run.wait(lambda status: status["step"] > held["step"] + 20, "training continues")
    assert run.incidents() == []
    assert run.stop().code == 130
