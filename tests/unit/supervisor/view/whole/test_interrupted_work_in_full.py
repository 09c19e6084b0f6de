"""The work that is waited for or interrupted has exactly these steps, times and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, RankState
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import HeldSnapshot, RankProgress, UncommittedWork
from supervisor.view import failed_start, interrupted_work
from supervisor.view.model import (
    InterruptedWork,
    JobState,
    MissedWork,
    OpenIncident,
    PendingStart,
    Policy,
    ResumePoint,
    SetAsideState,
    View,
    VoidStep,
    Wait,
)
from tests.unit.supervisor.job_views import S, fault, launcher, member, memory, rank, report, view
from tests.unit.supervisor.view.test_interrupted_work import HINT, KILLED, LOST, RAISED, at, group, late

POLICY = Policy(members=2, tail_s=60.0, unwind_s=30.0, grace_s=20.0)
DEAD = (rank(1, KILLED), at(1))
WORKS = (rank(0), at(0, tail_s=1.5))
SAVING = UncommittedWork(2.0, 0.001)


def waits(now: View) -> Wait | None:
    return interrupted_work.wait_for_survivors(now, POLICY)


def waiting(until_s: float, *numbers: int) -> Wait:
    ranks = ", ".join(map(str, numbers))
    return Wait(int(until_s * S), f"waiting for rank {ranks} to finish work outside of a step")


def changed(now: View, number: int, **given: Any) -> View:
    """Return the view with another member `number`."""
    members = list(now.members)
    members[number] = replace(members[number], **given)
    return replace(now, members=tuple(members))


EXPIRING = group((rank(0), at(0, tail_s=1.5, pause_left_s=90.0)), (rank(1), at(1, tail_s=1.5)))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (group(WORKS, DEAD), waiting(160.0, 0)),
        (group(WORKS, (rank(1), at(1, tail_s=0.1))), waiting(160.0, 0, 1)),
        (EXPIRING, waiting(160.0, 0, 1)),
        (replace(EXPIRING, now_ns=160 * S), waiting(190.0, 0)),
        (replace(EXPIRING, now_ns=190 * S), None),
        (group((rank(0), at(0, tail_s=1.5, pause_left_s=30.0)), DEAD), waiting(160.0, 0)),
        (group((rank(0), at(0, tail_s=1.5, pause_left_s=900.0)), DEAD), waiting(700.0, 0)),
        (group((rank(0), at(0, early=replace(SAVING, left_s=90.0))), (rank(1), at(1, 21)), (21,)),
         waiting(190.0, 0)),
        (group((rank(0), at(0, early=SAVING)), (rank(1), at(1, 20))), None),
        (group((rank(0), at(0, -1, early=SAVING)), (rank(1), at(1, 20))), None),
        (group((rank(0), at(0)), (rank(1, HINT, state="failing"), at(1))), waiting(130.0, 1)),
        (group(WORKS, (rank(1, HINT, state="failing"), at(1))), waiting(130.0, 0, 1)),
        (group((rank(0), at(0)), (rank(1, replace(HINT, overdue=True), state="failing"), at(1))), None),
        (group((rank(0), at(0)), (rank(1, HINT, state="failing"), at(1, 21))), None),
        (group((rank(0), at(0)), (rank(1, HINT, state="failing", generation=0), at(1))), None),
        (changed(group(WORKS, DEAD), 0, silent_s=2.0), None),
        (changed(group((rank(0), at(0)), (rank(1, HINT, state="failing"), at(1))), 1, silent_s=2.0), None),
        (changed(group(WORKS, DEAD), 0, name="m9"), None),
        (group((rank(0, generation=0), WORKS[1]), DEAD), None),
        (group((rank(5), WORKS[1]), DEAD), None),
    ],
)  # fmt: skip
def test_survivors_are_waited_for_until_the_first_of_their_limits(now: View, expected: Wait | None) -> None:
    assert waits(now) == expected


def test_a_stop_waits_for_no_longer_than_its_grace() -> None:
    now = group(WORKS, (rank(1, HINT, state="failing"), at(1)))
    assert waits(replace(now, memory=replace(now.memory, stop="graceful"))) == waiting(120.0, 0, 1)


@pytest.mark.parametrize(
    ("faults", "generation", "limited", "expected"),
    [
        ((fault("hang", 0),), 1, False, waiting(160.0, 1)),
        ((fault("hang", 0),), 0, False, waiting(160.0, 0, 1)),
        ((fault("crash", 0),), 1, False, waiting(160.0, 0, 1)),
        ((fault("crash", 1),), 1, True, waiting(160.0, 1)),
        ((fault("hang", -1),), 1, False, waiting(160.0, 1)),
    ],
)
def test_a_rank_that_hangs_or_is_beyond_its_limit_gets_no_more_time(
    faults: tuple[Any, ...], generation: int, limited: bool, expected: Wait
) -> None:
    now = group(WORKS, (rank(1), at(1, tail_s=1.5)))
    first = now.members[0].report
    assert first is not None
    now = changed(now, 0, report=replace(first, stalls=(late(0, limited),)))
    opened = OpenIncident(1, generation, 90 * S, 91 * S, 0.0, faults)
    assert waits(replace(now, memory=replace(now.memory, incident=opened))) == expected
    assert (waits(replace(now, memory=replace(now.memory, incident=None))) is not None) is True


def cut(number: int, at_most: int, after_s: float = 0.001, **given: Any) -> InterruptedWork:
    return InterruptedWork(number, 20, at_most, after_s, **given)


FINISHED = Ending(95 * S, 0)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (WORKS, DEAD, (cut(0, 19, 1.5),)),
        (WORKS, (rank(1, KILLED), at(1, tail_s=2.0004)), (cut(0, 19, 1.5), cut(1, 19, 2.0))),
        ((rank(0), at(0, tail_s=0.25)), DEAD, ()),
        ((rank(0), at(0, tail_s=2.0, tail_usual_s=0.4)), DEAD, ()),
        ((rank(0), at(0, tail_s=2.1, tail_usual_s=0.4)), DEAD, (cut(0, 19, 2.1),)),
        ((rank(0, FINISHED), at(0, tail_s=9.0, tail_declared=True)), DEAD, ()),
        ((rank(0, where="collective"), at(0, tail_s=9.0)), DEAD, ()),
        ((rank(0), at(0, tail_s=0.02, tail_declared=True)), DEAD, (cut(0, 19, 0.02),)),
        ((rank(0, replace(LOST, paused=20)), at(0, tail_s=0.02)), DEAD, (cut(0, 19, 0.02),)),
        ((rank(0, replace(LOST, paused=20)), at(0)), (rank(1), at(1, 21)), (cut(0, 20, early=True),)),
        ((rank(0, replace(LOST, paused=19)), at(0)), (rank(1), at(1, 21)), ()),
        ((rank(0, replace(FINISHED, paused=20)), at(0)), (rank(1), at(1, 21)), ()),
        ((rank(0, KILLED), at(0, early=SAVING)), (rank(1), at(1, 21)), (cut(0, 20, 2.0, early=True),)),
        ((rank(0, KILLED), at(0, early=UncommittedWork(0.25))), (rank(1), at(1, 21)), ()),
        ((rank(0, KILLED), at(0, early=UncommittedWork(2.0, 0.4))), (rank(1), at(1, 21)), ()),
        (
            (rank(0, KILLED), at(0, early=UncommittedWork(2.1, 0.4))),
            (rank(1), at(1, 21)),
            (cut(0, 20, 2.1, early=True),),
        ),
    ],
)
def test_find_returns_the_work_that_the_fault_interrupted(
    first: tuple[RankState, RankProgress],
    second: tuple[RankState, RankProgress],
    expected: tuple[InterruptedWork, ...],
) -> None:
    assert interrupted_work.find(group(first, second, (21, 20, 15)), ()) == expected


def test_the_work_of_a_rank_that_raised_an_exception_is_cut_off() -> None:
    def found(
        tail_s: float, *raised: Any, early: UncommittedWork | None = None
    ) -> tuple[InterruptedWork, ...]:
        now = group((rank(0), at(0, 21)), (rank(1, RAISED), at(1, tail_s=tail_s, early=early)), (21, 15))
        return interrupted_work.find(now, raised)

    exception = fault("exception", 1, 20)
    assert found(0.01, exception) == (cut(1, 19, 0.01, raised=True),)
    assert found(0.0, exception) == (cut(1, 20, 0.0, raised=True),)
    assert found(0.0, exception, early=SAVING) == (cut(1, 20, 0.0, raised=True),)
    assert found(0.0, fault("exception", 3, 0)) == (InterruptedWork(3, 0, 0, 0.0, raised=True),)
    assert found(0.0, fault("exception", 3, -1)) == (), "before its first step"
    assert found(0.01, fault("crash", 1, 20)) == ()
    assert found(0.0, fault("exception", 3, 7), exception) == (
        cut(1, 20, 0.0, raised=True),
        InterruptedWork(3, 7, 7, 0.0, raised=True),
    )


def test_at_step_zero_work_is_cut_off_as_at_any_other() -> None:
    first = (rank(0, replace(LOST, paused=0)), at(0, 0))
    assert interrupted_work.find(group(first, (rank(1), at(1, 1)), (1,)), ()) == (
        InterruptedWork(0, 0, 0, 0.001, early=True),
    )
    first = (rank(0, KILLED), at(0, 0, early=SAVING))
    assert interrupted_work.find(group(first, (rank(1), at(1, 1)), (1,)), ()) == (
        InterruptedWork(0, 0, 0, 2.0, early=True),
    )
    unknown = (rank(0, replace(LOST, paused=-1)), at(0, -1))
    assert interrupted_work.find(group(unknown, (rank(1), at(1, 1)), (1,)), ()) == ()


def test_the_work_before_a_failed_start_is_part_of_what_is_cut_off() -> None:
    known = PendingStart(2, 15, cut=(InterruptedWork(3, 20, 19, 9.0),), raised=(fault("exception", 3, 20),))
    now = group(WORKS, DEAD)
    pending = replace(now, memory=replace(now.memory, unbegun=known))
    assert interrupted_work.find(pending, ()) == (cut(0, 19, 1.5),)
    failed = replace(now, memory=replace(now.memory, unbegun=replace(known, failed=True)))
    assert interrupted_work.find(failed, ()) == (cut(0, 19, 1.5), *known.cut)
    assert failed_start.raised_before(failed.memory) == known.raised
    assert failed_start.raised_before(pending.memory) == ()
    assert failed_start.raised_before(now.memory) == ()


def test_steps_that_were_changed_after_their_commit_are_void_with_their_states() -> None:
    void = (VoidStep(1, 12, 0), VoidStep(1, 9, 1), VoidStep(1, 9, 0), VoidStep(2, 7, 0))
    now = group((rank(0), at(0, late=(20,), amended=(18, 19))), (rank(1), at(1, amended=(19,))))
    now = replace(now, memory=replace(now.memory, void=void))
    assert interrupted_work.recorded_void_steps(now.memory) == (9, 12)
    assert interrupted_work.void_steps(now) == {9, 12, 20}
    assert interrupted_work.void_states(now) == {(1, 9), (1, 12), (1, 20), (2, 7)}
    behind = group((rank(0), at(0, amended=(20,))), (rank(1), at(1, amended=(19,))))
    assert interrupted_work.void_steps(behind) == {20}
    assert interrupted_work.describe_passed_over(now, 19) == (
        "the state of step 20 was changed after its commit and is not used"
    )
    assert interrupted_work.describe_passed_over(now, 20) == ""
    lost = interrupted_work.lost_changes
    assert lost(now, ResumePoint(20, 1, "slot")) == (InterruptedWork(0, 20, 19),)
    assert lost(now, ResumePoint(9, 1, "checkpoint")) == (InterruptedWork(0, 9, 8), InterruptedWork(1, 9, 8))
    assert lost(now, ResumePoint(7, 2, "slot")) == (InterruptedWork(0, 7, 6),)
    assert lost(now, ResumePoint(20, 2, "slot")) == ()
    assert lost(now, ResumePoint(20, 1, "none")) == ()
    assert lost(behind, ResumePoint(20, 1, "slot")) == (InterruptedWork(0, 20, 19),)


def test_the_checkpoint_of_step_zero_may_be_published_once_all_ranks_are_beyond_it() -> None:
    for step, published in ((0, -1), (1, 0)):
        now = group((rank(0), at(0, step)), (rank(1), at(1, 1)))
        told = now.members[0].report
        assert told is not None
        asks = replace(now.members[0], report=replace(told, publishing=0))
        assert interrupted_work.publishable_step(now, asks) == published
        assert interrupted_work.publishable_step(now, replace(asks, report=None)) == -1


def test_the_latest_resume_step_precedes_all_work_that_was_cut_off() -> None:
    cuts = (InterruptedWork(0, 20, 19), InterruptedWork(1, 20, 20))
    assert interrupted_work.latest_resume_step(cuts, None) == 19
    assert interrupted_work.latest_resume_step(cuts, 12) == 12
    assert interrupted_work.latest_resume_step((), 12) == 12
    assert interrupted_work.latest_resume_step((), None) is None
    assert [interrupted_work.not_repeated(cuts, step) for step in (19, 20, 21)] == [(), cuts[:1], cuts]


def test_the_description_of_cut_off_work_names_at_most_the_first_cases() -> None:
    after = [InterruptedWork(number, 20 + number, 19) for number in range(4)]
    before = InterruptedWork(5, 30, 30, early=True)
    assert (
        interrupted_work.describe((after[0],))
        == "work after commit was cut short 1 time: rank 0 after step 20"
    )
    assert (
        interrupted_work.describe((before,)) == "work before commit was cut short 1 time: rank 5 in step 30"
    )
    assert interrupted_work.describe((before, *after)) == (
        "work before or after commit was cut short 5 times:"
        " rank 5 in step 30, rank 0 after step 20, rank 1 after step 21 and 2 more"
    )
    three = tuple(after[:3])
    listed = "rank 0 after step 20, rank 1 after step 21, rank 2 after step 22"
    assert interrupted_work.describe(three) == f"work after commit was cut short 3 times: {listed}"


# -- what a start changed


FIRST = JobState(2, 1, generation=4, seen=6, lineage=(Lineage(1, 9),), equal=(8,), saved=7)
MISSED = (MissedWork(1, 0, 5),)
BEFORE = PendingStart(4, 15, bound=12, raised=(fault("exception", 0, 9),), failed=True)
ASIDE = SetAsideState((Lineage(1, 3),), MISSED, (2,), 3)


@pytest.mark.parametrize(
    ("given", "bound", "from_scratch", "expected"),
    [
        ({}, None, False, {}),
        ({"seen": 0}, 30, False, {"generation": 5, "bound": 30}),
        ({"unbegun": BEFORE}, None, False, {"bound": 12, "raised": BEFORE.raised}),
        ({"unbegun": BEFORE}, 9, False, {"bound": 9, "raised": BEFORE.raised}),
        ({"unbegun": replace(BEFORE, failed=False)}, 30, False, {"bound": 30}),
        ({"unbegun": replace(BEFORE, failed=False, aside=ASIDE)}, None, False, {"aside": ASIDE}),
        ({}, None, True, {"aside": SetAsideState(FIRST.lineage, MISSED, (8,), 7)}),
    ],
)
def test_a_pending_start_records_what_to_restore_if_it_fails(
    given: dict[str, Any], bound: int | None, from_scratch: bool, expected: dict[str, Any]
) -> None:
    now = View(100 * S, 0.0, replace(FIRST, missed=MISSED, **given))
    made = failed_start.pending_start(now, 21, bound, (cut(0, 19),), (), from_scratch=from_scratch)
    usual = PendingStart(7, 21, FIRST.lineage, MISSED, (8,), None, (cut(0, 19),))
    assert made == replace(usual, **expected)


KNOWN = PendingStart(1, 20, (Lineage(0, 9),), MISSED, (8, 16), 12)


def test_a_failed_start_is_undone_completely() -> None:
    now = view(lineage=(Lineage(1, 20),), equal=(4,), missed=(), unbegun=KNOWN)
    undone = replace(KNOWN, failed=True)
    assert failed_start.without_failed_start(now) == replace(
        now.memory, lineage=(Lineage(0, 9), Lineage(1, 12)), missed=MISSED, equal=(8, 12), unbegun=undone
    )
    free = replace(now, memory=replace(now.memory, unbegun=replace(KNOWN, bound=None)))
    assert failed_start.without_failed_start(free) == replace(
        *(now.memory,),
        lineage=KNOWN.lineage,
        missed=MISSED,
        equal=(8, 16),
        unbegun=replace(undone, bound=None),
    )


@pytest.mark.parametrize(
    ("given", "step", "slot", "undone"),
    [
        ({}, 20, HeldSnapshot(1, 20, 8), True),
        ({}, 21, HeldSnapshot(1, 20, 8), False),
        ({}, 20, HeldSnapshot(1, 21, 8), False),
        ({}, 20, HeldSnapshot(2, 21, 8), True),
        ({"unbegun": replace(KNOWN, failed=True)}, 20, None, False),
        ({"unbegun": replace(KNOWN, generation=2)}, 20, None, False),
        ({"unbegun": None}, 20, None, False),
        ({"settled": True}, 20, None, False),
        ({"reached": 21}, 20, None, False),
    ],
)
def test_a_start_has_failed_if_no_step_was_done_from_it(
    given: dict[str, Any], step: int, slot: HeldSnapshot | None, undone: bool
) -> None:
    told = report("m0", launcher(rank(0)), progress=(at(0, step),), slots=(slot,) if slot else ())
    now = view(member("m0", told), member("m1"), **{"unbegun": KNOWN, **given})
    assert (failed_start.without_failed_start(now) != now.memory) is undone


def test_a_run_from_scratch_is_one_until_its_first_step() -> None:
    def is_one(step: int, aside: SetAsideState | None = ASIDE, **given: Any) -> bool:
        return failed_start.is_from_scratch(memory(unbegun=replace(KNOWN, aside=aside), **given), step)

    assert [is_one(step) for step in (19, 20, 21)] == [True, True, False]
    assert not is_one(20, None)
    assert not is_one(20, settled=True)
    assert not failed_start.is_from_scratch(memory(), 0)
    left = memory(unbegun=replace(KNOWN, aside=ASIDE))
    assert failed_start.state_for_next_run(left) == replace(
        left, lineage=ASIDE.lineage, missed=MISSED, equal=(2,), saved=3
    )
    for kept in (replace(left, settled=True), memory(), memory(unbegun=KNOWN)):
        assert failed_start.state_for_next_run(kept) is kept


def test_a_declared_pause_of_a_lost_member_is_cut_off_if_unusual_whatever_its_length() -> None:
    def cuts(seconds: float, usual_s: float, declared: bool = True) -> tuple[InterruptedWork, ...]:
        early = UncommittedWork(seconds, usual_s, declared)
        now = group((rank(0, KILLED), at(0, early=early)), (rank(1), at(1, 21)), (21, 15))
        return interrupted_work.find(changed(now, 0, connected=False), ())

    assert cuts(0.1, 0.0) == (cut(0, 20, 0.1, early=True),)
    assert cuts(0.1, 0.0, declared=False) == ()
    assert cuts(0.5, 0.1) == ()


def test_work_of_each_rank_is_found_whatever_the_ranks_before_it_did() -> None:
    first = (rank(0, FINISHED), at(0, tail_s=9.0))
    assert interrupted_work.find(group(first, (rank(1, KILLED), at(1, tail_s=2.0))), ()) == (cut(1, 19, 2.0),)
    usual = (rank(0), at(0, tail_s=0.1))
    assert interrupted_work.find(group(usual, (rank(1, KILLED), at(1, tail_s=2.0))), ()) == (cut(1, 19, 2.0),)


def test_without_a_held_snapshot_nothing_within_a_step_is_cut_off() -> None:
    early = (rank(0, KILLED), at(0, 0, early=SAVING))
    raised = (rank(0, replace(LOST, paused=0)), at(0, 0))
    for first in (early, raised):
        assert interrupted_work.find(group(first, (rank(1), at(1, 1)), ()), ()) == ()
