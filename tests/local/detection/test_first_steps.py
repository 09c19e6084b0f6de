"""A hang that comes back in the first step after a restart is found without `--first-step-timeout`."""

from __future__ import annotations

import pytest

from supervisor.view.model import Policy
from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

STEP = 37
STALL_LIMIT_S = 3.0
OPTIONS = f"--members 2 --checkpoint-every 0 --stall-limit {STALL_LIMIT_S:g}s"


@pytest.mark.parametrize(("how", "rank"), [("sleep", 1), ("lock", 1), ("barrier", None)])
def test_the_same_hang_again_is_found_after_a_multiple_of_the_stall_limit(
    start: Start, how: str, rank: int | None
) -> None:
    run = start(OPTIONS, "hangs_again.py", how, STEP)
    run.wait(lambda status: status["incidents"] >= 3, "the hang comes back twice", 120)
    first, second = run.incidents()[:2]  # the third may not be decided yet
    assert [(each["kind"], each["rank"], each["step"]) for each in (first, second)] == [
        ("hang", rank, STEP)
    ] * 2
    subject = "the group hangs" if rank is None else f"rank {rank} hangs"
    assert "hangs again" not in first["why"]
    assert f"{subject} again in step {STEP}: " in second["why"], second["why"]
    assert second["detected_s"] < Policy().first_step_s / 10, second["timeline"]
    ended = run.stop()
    # On a busy machine, the second inspection may end only after the first of these limits.
    announced = [f"Holdfast restarts it at {times * STALL_LIMIT_S:.0f} s" for times in (2, 4)]
    assert any(each in ended.output for each in announced)
    assert ended.code == 130


def test_the_user_learns_early_that_an_unmodified_script_waits_in_its_first_step(start: Start) -> None:
    run = start(f"--members 2 --stall-limit {STALL_LIMIT_S:g}s", "unjoined_hangs.py")
    told = run.wait(lambda status: status["warnings"], "a note")
    assert len(told["warnings"]) == 1
    assert "rank 1 has been in load (unjoined_hangs.py:" in told["warnings"][0]
    assert "no step of a torch.optim optimizer for " in told["warnings"][0]
    assert " while rank 0 waits in " in told["warnings"][0]
    assert "(--first-step-timeout)" in told["warnings"][0]
    assert run.incidents() == []
    ended = run.stop()
    assert f"holdfast: {told['warnings'][0][:40]}" in ended.output
