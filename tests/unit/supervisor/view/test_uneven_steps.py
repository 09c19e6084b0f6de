"""Ranks that did not do the same number of steps are reported as the cause instead of gloo's error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, Restore
from supervisor.view import faults
from supervisor.view.model import Fault, Policy
from tests.unit.supervisor.job_views import LAUNCH, S, launcher, member, progress, rank, report, view

POLICY = Policy(members=2)
VICTIM = Ending(95 * S, 1, fail="distributed", failed_ns=95 * S, message="Connection closed by peer")
WELL = Ending(94 * S, 0)


def seen(first: tuple[str, int], second: tuple[str, int], ended: Ending | None = WELL, **given: Any) -> Fault:
    """Return the root cause where rank 0 ended at (phase, step) and rank 1 failed in a collective.

    A `*` marks a phase that came after a commit.
    """
    members = []
    for number, (phase, step), ending in ((0, first, ended), (1, second, VICTIM)):
        told = report(
            f"m{number}",
            launcher(rank(number, ending), **given),
            progress=(replace(progress(number, step), phase=phase.strip("*"), tail_s=1.0 * ("*" in phase)),),
        )
        members.append(member(f"m{number}", told))
    return faults.root_cause(faults.find_faults(view(*members), POLICY))


def test_a_rank_that_finished_its_loop_before_the_others_is_the_cause() -> None:
    cause = seen(("idle*", 20), ("backward", 20))
    assert (cause.kind, cause.rank, cause.code) == ("bad_input", 0, 2)
    assert cause.message == (
        "rank 0 left its loop at step 20 while rank 1 was in step 21: "
        "all ranks must do the same number of steps"
    )


@pytest.mark.parametrize("left", ["data", "idle"])
@pytest.mark.parametrize("failed", ["backward", "idle"])
def test_a_rank_that_leaves_with_0_in_the_middle_of_its_loop_is_the_cause(left: str, failed: str) -> None:
    """`sys.exit` raises an exception, which ends the loop. Its page then shows idle, without a tail."""
    cause = seen((left, 31), (failed, 31))
    assert (cause.kind, cause.rank, cause.step) == ("crash", 0, 31)
    assert cause.detail == "rank 0 exited with code 0 in the middle of its loop, after step 31"


@pytest.mark.parametrize(
    ("first", "second"),
    [(("idle*", 20), ("idle*", 20)), (("idle*", 20), ("tail*", 20)), (("idle*", 20), ("optimizer", 19))],
)
def test_ranks_that_did_the_same_steps_are_not_accused(
    first: tuple[str, int], second: tuple[str, int]
) -> None:
    assert seen(first, second).kind == "victim"


def test_a_rank_that_failed_is_the_cause_itself() -> None:
    assert seen(("idle*", 20), ("backward", 20), Ending(94 * S, None, 9)).kind == "crash"


def test_for_a_script_that_does_not_join_no_cause_is_known() -> None:
    assert seen(("data", 20), ("data", 20), joins=False).kind == "victim"


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("idle", "rank 0 exited with code 0 at step 20 while rank 1 waited for it in a collective"),
        ("data", "rank 0 exited with code 0 in the middle of its loop, after step 20"),
    ],
)
def test_in_a_generation_without_a_step_only_certain_causes_are_reported(phase: str, says: str) -> None:
    """It resumed where a rank leaves the loop, or at the loop's end, and failed afterwards."""
    restored = replace(LAUNCH, restore=Restore(20, 1, "slot"))
    told = [
        member(
            f"m{number}",
            report(
                f"m{number}",
                launcher(rank(number, ending)),
                progress=(replace(progress(number, 20), phase=phase if number == 0 else "idle"),),
            ),
        )
        for number, ending in ((0, WELL), (1, VICTIM))
    ]
    cause = faults.root_cause(faults.find_faults(view(*told, launch=restored), POLICY))
    assert (cause.kind, cause.rank, cause.detail) == ("crash", 0, says)
