"""A group that rolls back to an older state but cannot start there does not lose the newer state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.protocol.lineage import Lineage, valid
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, RankProgress
from supervisor.decision import orders, remedy, transition
from supervisor.decision.decide import decide
from supervisor.view import failed_start
from supervisor.view.model import (
    End,
    Fault,
    InterruptedWork,
    JobState,
    MissedWork,
    OpenIncident,
    Policy,
    Save,
    Secure,
    Settle,
    Start,
    StorageContents,
    View,
)
from tests.unit.supervisor.job_views import S, fault, launcher, member, memory, progress, rank, report

POLICY = Policy(members=2)
NEW, OLD = 35, 23
CUT = InterruptedWork(0, NEW, NEW - 1, 9.0)
RESTORE = fault("restore", step=OLD, signature="slot 1 23")


def seen(found: JobState, *steps: int, at: int = -1, now_s: float = 100.0) -> View:
    """Return the view of two members that hold whole states of `steps` of generation 1."""
    view = looked(found, *steps, at=at, now_s=now_s)
    return replace(view, memory=failed_start.without_failed_start(view))


def looked(found: JobState, *steps: int, at: int = -1, now_s: float = 100.0) -> View:
    members = []
    for number in (0, 1):
        name = f"m{number}"
        told = report(
            name,
            launcher(rank(number, generation=found.generation), generation=found.generation),
            slots=tuple(HeldSnapshot(1, step, 8) for step in steps),
            privates=tuple(HeldPrivateState(r, 1, step, True) for r in (0, 1) for step in steps),
            progress=(progress(number, at),) if at >= 0 else (),
            secured_for=found.generation,
        )
        members.append(member(name, told))
    return View(int(now_s * S), 0.0, found, tuple(members))


def secured(found: JobState, *faults: Fault, steps: tuple[int, ...] = (NEW, OLD), at: int = -1) -> JobState:
    return transition.after(looked(found, *steps, at=at), Secure(faults, True, "a fault"), POLICY)


def gone_back(*faults: Fault, progressed: RankProgress | None = None) -> JobState:
    """Return the memory of a group that goes back to `OLD` and has not started there yet."""
    opened = OpenIncident(1, 1, 90 * S, 91 * S, 0.0, faults)
    known = memory(phase="securing", incident=opened, incidents=1, settled=True)
    before = seen(known, NEW, OLD, at=NEW)
    if progressed is not None:
        told = before.members[0].report
        assert told is not None
        first = replace(before.members[0], report=replace(told, progress=(progressed,)))
        before = replace(before, members=(first, before.members[1]))
    action = remedy.start_generation(before, POLICY, faults[0], faults)
    assert isinstance(action, Start)
    assert action.resume.step == OLD
    return transition.after(before, action, POLICY)


IN_EVALUATION = replace(progress(0, NEW), tail_s=9.0)


def test_the_newer_state_is_used_if_the_older_one_cannot_be_restored() -> None:
    back = gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION)
    assert back.lineage == (Lineage(2, OLD),)
    assert back.missed == ()
    failed = secured(back, RESTORE, steps=(NEW,))
    action = remedy.start_generation(seen(failed, NEW), POLICY, RESTORE, (RESTORE,))
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (NEW, (replace(CUT, after_s=9.0),))
    went_on = transition.after(seen(failed, NEW), action, POLICY)
    assert [(each.rank, each.step) for each in went_on.missed] == [(0, NEW)]


def test_an_existing_older_state_is_tried_first() -> None:
    back = gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION)
    failed = secured(back, RESTORE, steps=(NEW, 12))
    action = remedy.start_generation(seen(failed, NEW, 12), POLICY, RESTORE, (RESTORE,))
    assert isinstance(action, Start)
    assert action.resume.step == 12
    assert transition.after(seen(failed, NEW, 12), action, POLICY).missed == ()


def test_a_holder_that_dies_before_the_first_step_loses_only_its_own_state() -> None:
    back = gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION)
    killed = fault("crash", 1, OLD)
    failed = secured(back, killed, steps=(NEW,), at=OLD)
    action = remedy.start_generation(seen(failed, NEW, at=OLD), POLICY, killed, (killed,))
    assert isinstance(action, Start)
    assert action.resume.step == NEW


def test_a_group_that_has_done_a_step_is_not_rolled_back() -> None:
    back = gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION)
    killed = fault("crash", 1, OLD + 1)
    assert secured(back, killed, at=OLD + 1).lineage == (Lineage(2, OLD),)
    copied = seen(secured(back, killed), NEW, OLD)
    told = copied.members[1].report
    assert told is not None
    second = replace(copied.members[1], report=replace(told, slots=(HeldSnapshot(2, OLD + 1, 8),)))
    late = replace(copied, memory=secured(back, killed), members=(copied.members[0], second))
    assert failed_start.without_failed_start(late).lineage == (Lineage(2, OLD),), (
        "a copy shows a step that no page shows"
    )
    settled = transition.after(seen(back, OLD, at=OLD + 1), Settle(99 * S, "a step"), POLICY)
    assert settled.unbegun is None
    assert secured(settled, killed).lineage == (Lineage(2, OLD),)


def test_a_bad_number_limits_the_usable_states_as_before() -> None:
    bad = fault("nan", 0, 30)
    back = gone_back(bad)
    failed = secured(back, RESTORE, steps=(NEW, 28))
    assert seen(failed, NEW, 28).memory.lineage == (Lineage(2, 30),)
    action = remedy.start_generation(seen(failed, NEW, 28), POLICY, RESTORE, (RESTORE,))
    assert isinstance(action, Start)
    assert action.resume.step == 28
    again = secured(transition.after(seen(failed, NEW, 28), action, POLICY), RESTORE, steps=(NEW,))
    ended = remedy.start_generation(seen(again, NEW), POLICY, RESTORE, (RESTORE,))
    assert isinstance(ended, End)  # each time that it is undone
    assert "the run later went back to step 30" in ended.why


def test_a_failed_start_from_scratch_stays_a_start_from_scratch() -> None:
    anew = replace(POLICY, from_scratch=True)
    before = seen(memory(phase="forming", generation=1), NEW)
    action = remedy.start_generation(before, anew, None, ())
    assert isinstance(action, Start)
    failed = secured(transition.after(before, action, anew), fault("crash", 0, -1), steps=(NEW,))
    assert seen(failed, NEW).memory.lineage == (Lineage(2, 0),)


def test_an_exception_that_only_newer_states_follow_ends_the_run() -> None:
    raised = fault("exception", 0, NEW, message="RuntimeError: eval failed", code=1)
    back = gone_back(raised, progressed=IN_EVALUATION)
    failed = secured(back, RESTORE, steps=(NEW,))
    ended = remedy.start_generation(seen(failed, NEW), POLICY, RESTORE, (RESTORE,))
    assert isinstance(ended, End)
    assert ended.message == "RuntimeError: eval failed"


@pytest.mark.parametrize("times", [1, 2])
def test_an_end_after_a_failed_start_leaves_the_next_run_the_newer_state_and_names_the_work(
    times: int,
) -> None:
    failed = secured(gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION), RESTORE, steps=(NEW,))
    for _ in range(times):  # End comes once, but its effect must not change if it is repeated
        securing = replace(failed, phase="securing")
        failed = transition.after(seen(securing, NEW), End(1, "the storage is gone"), POLICY)
    assert failed.lineage == ()
    assert failed.missed[-1] == MissedWork(0, 0, NEW)


def test_a_stop_after_a_failed_start_saves_the_newer_state_and_makes_nothing_void() -> None:
    failed = secured(gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION), RESTORE, steps=(NEW,))
    stopped = looked(replace(failed, stop="graceful"), NEW)
    saves = decide(stopped, POLICY)
    assert isinstance(saves, Save)
    assert saves.resume.step == NEW
    order = orders.order_for(transition.after(stopped, saves, POLICY), saves.member, POLICY, None)
    assert valid(order.save_generation, order.save_step, order.lineage), "its own order forbids it"


def test_an_immediate_stop_after_a_failed_start_makes_nothing_void_and_names_the_work() -> None:
    back = gone_back(fault("crash", 0, NEW), progressed=IN_EVALUATION)
    stopped = looked(replace(back, stop="now"), NEW, OLD)
    ended = transition.after(stopped, decide(stopped, POLICY), POLICY)
    assert (ended.exit_code, ended.lineage) == (130, ())
    assert ended.missed == (MissedWork(0, 0, NEW),)


def test_exceptions_of_start_after_start_are_each_kept_once() -> None:
    first, again = (fault("exception", 0, NEW, message=text) for text in ("ValueError: 1", "ValueError: 2"))
    other = fault("exception", 1, NEW)
    known = failed_start.pending_start(looked(memory()), NEW, None, (), (first,))
    failed = memory(unbegun=replace(known, failed=True))
    assert failed_start.pending_start(looked(failed), NEW, None, (), (again, other)).raised == (first, other)


def begun_anew() -> JobState:
    """Return the memory of a run that starts from scratch and has not done a step."""
    before = seen(memory(phase="forming", generation=1, lineage=(Lineage(1, 9),)), NEW)
    action = remedy.start_generation(before, ANEW, None, ())
    assert isinstance(action, Start)
    after = transition.after(before, action, ANEW)
    assert after.lineage == (Lineage(2, 0),)
    return after


ANEW = replace(POLICY, from_scratch=True)


def test_a_run_from_scratch_that_ends_before_its_first_step_makes_nothing_void() -> None:
    anew, before = begun_anew(), (Lineage(1, 9),)
    assert failed_start.state_for_next_run(anew).lineage == before, "it is killed"
    for how in ("now", "graceful"):
        stopped = looked(replace(anew, stop=how, phase="securing" if how == "graceful" else "running"))
        ended = transition.after(stopped, End(130, "stopped"), ANEW)
        assert failed_start.state_for_next_run(ended).lineage == before
    killed = fault("crash", 0, -1)
    failed = secured(anew, killed, steps=())
    again = remedy.start_generation(seen(failed), ANEW, killed, (killed,))
    assert isinstance(again, Start)
    assert failed_start.state_for_next_run(transition.after(seen(failed), again, ANEW)).lineage == before
    began = transition.after(seen(anew, at=1), Settle(99 * S, "a step"), ANEW)
    assert failed_start.state_for_next_run(began).lineage == (Lineage(2, 0),)


def test_a_run_from_scratch_that_is_stopped_before_its_first_step_saves_nothing() -> None:
    """A checkpoint of its step 0 would delete the older ones, because the run has made them void."""
    anew = replace(begun_anew(), stop="graceful", phase="securing")
    for step in (0, 1):
        begins = looked(anew)
        held = tuple(
            replace(
                each,
                report=replace(
                    each.report,
                    slots=(HeldSnapshot(2, step, 8),),
                    privates=tuple(HeldPrivateState(rank, 2, step, True) for rank in (0, 1)),
                ),
            )
            for each in begins.members
            if each.report is not None
        )
        stopped = replace(begins, members=held, stored=StorageContents(looked_ns=101 * S))
        action = decide(stopped, ANEW)
        assert isinstance(action, Save if step else End)
        if not step:
            ended = transition.after(stopped, action, ANEW)
            assert (ended.exit_code, ended.why) == (130, "stopped as requested, before the first step")
            assert (ended.lineage, ended.missed) == ((Lineage(1, 9),), ())


def test_states_set_aside_by_a_run_from_scratch_are_found_unchanged_later() -> None:
    missed = (MissedWork(1, 0, 5),)
    before = memory(
        phase="forming", generation=1, lineage=(Lineage(1, 9),), saved=9, equal=(8,), missed=missed
    )
    action = remedy.start_generation(seen(before), ANEW, None, ())
    assert isinstance(action, Start)
    begun = transition.after(seen(before), action, ANEW)
    assert (begun.saved, begun.equal) == (-1, ())
    left = failed_start.state_for_next_run(begun)
    assert (left.lineage, left.saved, left.equal, left.missed) == (before.lineage, 9, (8,), missed)


def test_a_step_that_raised_repeatedly_is_done_by_the_next_run_and_not_skipped() -> None:
    """It resumes where that step begins."""
    raised = fault("exception", 0, NEW, message="ValueError: 1")
    cut_off = InterruptedWork(0, NEW, NEW, raised=True)
    known = failed_start.pending_start(looked(memory()), NEW, None, (cut_off,), (raised,))
    failed = memory(unbegun=replace(known, failed=True))
    ended = transition.after(looked(failed, NEW), End(1, "a bug", cause=raised), POLICY)
    assert ended.missed == (MissedWork(0, 0, NEW, early=True),)
    again = memory(phase="forming", missed=ended.missed, generation=1)
    for step, left in ((NEW, ()), (NEW + 1, ended.missed)):
        begins = remedy.start_generation(seen(again, step), POLICY, None, ())
        assert isinstance(begins, Start)
        assert transition.after(seen(again, step), begins, POLICY).missed == left
