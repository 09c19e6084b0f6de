"""Two inspections of ranks that all wait for each other can prove a deadlock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, RankInspection
from supervisor.hangs import deadlock, detection, observation
from supervisor.hangs.verdict import StallVerdict
from supervisor.view.model import LearnedStall, MemberView, PastFault, Policy, StallWatch, View
from tests.unit.supervisor.hangs.test_detection import POLICY, seen, there
from tests.unit.supervisor.hangs.test_evidence import BACKWARD, PLAIN, REDUCING
from tests.unit.supervisor.job_views import S

LINE = 0x5EED  # the bytes of the connection between two ranks, in the sums of both
REDUCES = replace(
    PLAIN,
    stack=BACKWARD,
    at="_engine_run_backward (torch/autograd/graph.py:979)",
    where="<module> (train.py:31)",
    rests_s=86_000.0,
    mark=7,
    ends=LINE,
)
MEETS = replace(
    REDUCES,
    stack=REDUCING,
    at="barrier (torch/distributed/distributed_c10d.py:5356)",
    where="evaluate (train.py:40)",
)
PLACE = "barrier, called by evaluate (train.py); the backward pass, called by <module> (train.py)"


def both(
    first: RankInspection, second: RankInspection, turn: int = 1, asked: int = 0, **given: Any
) -> tuple[MemberView, ...]:
    inspections = (replace(each, asked=asked) for each in (first, second))
    return tuple(
        there(number, inspection, turn=turn, **given) for number, inspection in enumerate(inspections)
    )


def twice(first: RankInspection, second: RankInspection, *later: RankInspection, **given: Any) -> View:
    """Return the view after an inspection of all ranks and a second, requested one, at `later` if given."""
    names = ("phase", "stalled", "late_s", "early_s", "at_s", "first_step", "step")
    kinds = {name: given.pop(name) for name in names if name in given}
    before = seen(*both(first, second, **kinds), **given)
    one, other = later or (first, second)
    return after(before, *both(one, other, turn=2, asked=deadlock.inspection_id(before), **kinds))


def after(before: View, *members: MemberView) -> View:
    """Return the view half a second later."""
    now = replace(before, now_ns=before.now_ns + S // 2, members=members)
    return replace(now, watch=observation.update(before.watch, now))


def judged(view: View, policy: Policy = POLICY) -> StallVerdict:
    found = detection.judge(view, policy)
    assert found is not None
    return found


def is_certain(view: View, policy: Policy = POLICY) -> bool:
    found = judged(view, policy)
    return found.act_ns is not None and found.act_ns <= view.now_ns


def test_ranks_at_rest_in_mismatched_collectives_are_restarted_at_once_without_blame() -> None:
    view = twice(REDUCES, MEETS)
    found = judged(view)
    assert is_certain(view)
    assert found.why == (
        "all ranks wait for each other, and nothing is in transit:"
        " rank 0 in the backward pass, called by <module> (train.py:31),"
        " rank 1 in barrier, called by evaluate (train.py:40)."
        " All ranks must enter the same collectives in the same order"
    )
    assert found.fault is not None
    assert (found.fault.kind, found.fault.rank, found.fault.member, found.fault.step) == ("hang", -1, "", 5)
    assert (found.fault.place, found.fault.work) == (PLACE, "")


def test_being_in_the_same_collective_does_not_prevent_a_deadlock_verdict() -> None:
    view = twice(MEETS, MEETS)
    assert is_certain(view)
    assert "each is in barrier, called by evaluate (train.py:40)." in judged(view).why


def test_one_inspection_is_not_enough_and_a_second_one_with_its_own_number_is_requested() -> None:
    before = seen(*both(REDUCES, MEETS))
    assert deadlock.inspection_id(before) == before.now_ns
    assert not is_certain(before)
    unasked = after(before, *both(REDUCES, MEETS, turn=2, asked=1))
    assert not is_certain(unasked), "it may have been taken before the other rank was seen at rest"
    assert deadlock.inspection_id(unasked) == before.now_ns
    one = both(REDUCES, MEETS, turn=2, asked=before.now_ns)[0], both(REDUCES, MEETS)[1]
    assert not is_certain(after(before, *one))


def test_an_inspection_that_another_supervisor_requested_proves_nothing() -> None:
    assert not is_certain(seen(*both(REDUCES, MEETS, asked=99 * S)))


def test_only_late_ranks_are_inspected() -> None:
    calm = seen(*both(REDUCES, MEETS, stalled=False))
    assert deadlock.inspection_id(calm) == 0
    assert deadlock.inspection_id(seen(*both(PLAIN, MEETS))) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(REDUCES, rests_s=0.0, mark=0, ends=0, stirs="thread x runs"), id="stirs"),
        pytest.param(replace(REDUCES, rests_s=30.0), id="its wait ends before the limit"),
        pytest.param(replace(REDUCES, ends=LINE ^ 0xABC), id="a connection leads elsewhere"),
        pytest.param(replace(REDUCES, children=1), id="a child process works"),
        pytest.param(replace(REDUCES, io_bytes=9), id="it writes"),
        pytest.param(replace(REDUCES, cpu_s=0.1, stack=REDUCING), id="it computes"),
        pytest.param(replace(REDUCES, process_state="T"), id="it is stopped"),
        pytest.param(replace(REDUCES, traced=True), id="a debugger is attached"),
        pytest.param(replace(REDUCES, stack=PLAIN.stack), id="it waits in no collective"),
    ],
)
def test_one_rank_that_is_not_known_to_be_at_rest_keeps_the_ordinary_limit(
    other: RankInspection,
) -> None:
    view = twice(other, MEETS)
    assert deadlock.deadlocked_ranks(view, 60.0) == ()
    late = detection.judge(view, POLICY)
    assert late is not None
    assert "nothing is in transit" not in late.why


@pytest.mark.parametrize("moved", [0, 1])
def test_a_rank_that_has_moved_between_two_inspections_is_inspected_again(moved: int) -> None:
    inspections = [REDUCES, MEETS]
    inspections[moved] = replace(inspections[moved], mark=8)
    view = twice(REDUCES, MEETS, *inspections)
    assert not is_certain(view)
    asked = deadlock.inspection_id(view)
    assert asked > 1
    assert is_certain(after(view, *both(inspections[0], inspections[1], turn=3, asked=asked)))


def test_a_rank_that_is_unseen_or_has_left_may_still_arrive() -> None:
    three: dict[str, Any] = {"placement": ("m0", "m1", "m2"), "world_size": 3}
    assert not is_certain(twice(REDUCES, MEETS, **three))
    left = there(2, None, stalled=False, ending=Ending(1, 0))
    before = seen(*both(REDUCES, MEETS), left, **three)
    assert deadlock.inspection_id(before) == 1


def test_a_pause_of_a_rank_that_waits_for_the_others_does_not_delay_the_verdict() -> None:
    """Otherwise nothing would be done for half an hour, because this rank is not late until then."""
    pausing = [there(0, replace(REDUCES, asked=0)), there(1, MEETS, phase="eval", stalled=False)]
    before = seen(*pausing)
    assert judged(before).act_ns is None
    asked = deadlock.inspection_id(before)
    again = [
        there(0, replace(REDUCES, asked=asked), turn=2),
        there(1, replace(MEETS, asked=asked), phase="eval", stalled=False, turn=2),
    ]
    assert is_certain(after(before, *again))


def test_a_learned_limit_is_the_least_time_of_a_wait() -> None:
    given: dict[str, Any] = {"learned": (LearnedStall("a collective", 500.0),)}
    assert not is_certain(twice(replace(REDUCES, rests_s=1400.0), MEETS, **given))
    assert is_certain(twice(replace(REDUCES, rests_s=1600.0), MEETS, **given))


def test_a_deadlock_does_not_wait_for_a_limit_that_one_slow_step_has_made_longer() -> None:
    early = {"early_s": 5.0, "late_s": 6.0, "at_s": 200.0}
    assert is_certain(twice(REDUCES, MEETS, **early))
    short = replace(REDUCES, rests_s=150.0)
    assert not is_certain(twice(short, MEETS, **early)), "the wait ends before the group would be restarted"


def test_a_first_step_and_its_waits_have_their_own_limit() -> None:
    short = replace(REDUCES, rests_s=500.0)
    assert is_certain(twice(short, MEETS))
    before = seen(there(0, short, first_step=True), there(1, MEETS))
    asked = deadlock.inspection_id(before)
    inspections = replace(short, asked=asked), replace(MEETS, asked=asked)
    assert not is_certain(
        after(before, there(0, inspections[0], turn=2, first_step=True), there(1, inspections[1], turn=2))
    )


def test_a_repetition_at_the_same_step_and_place_is_observed_for_longer_and_counts_as_the_same() -> None:
    past = PastFault("hang", -1, "", 5, "deadlock", 0, 1, place=PLACE)
    view = twice(REDUCES, MEETS, history=(past,))
    found = judged(view)
    assert not is_certain(view)
    assert (found.limit_s, found.act_ns) == (120.0, view.watch.since_ns + 120 * S)
    assert "the limit is now 120 s" in (found.fault.detail if found.fault else "")
    first = judged(twice(REDUCES, MEETS)).fault
    assert found.fault is not None
    assert first is not None
    assert (found.fault.signature, found.fault.work) == (first.signature, "")
    assert is_certain(twice(REDUCES, MEETS, history=(replace(past, step=3),))), (
        "the earlier hang was at another step"
    )
    assert is_certain(view, replace(POLICY, hang_floor_s=1.0)), "the user set this limit"


def test_an_observation_restarts_with_each_generation_and_once_no_rank_is_late() -> None:
    view = twice(REDUCES, MEETS)
    assert [each.rank for each in view.watch.rests] == [0, 1]
    calm = after(view, *both(REDUCES, MEETS, stalled=False))
    assert calm.watch.rests == ()
    assert observation.update(replace(view.watch, generation=0), calm) == StallWatch(1)
