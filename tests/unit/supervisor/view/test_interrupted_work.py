"""Work after a commit that a restart would interrupt: waited for, repeated, or reported as missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import Ending, RankState
from holdfast.protocol.member_messages import RankProgress, RankStall, UncommittedWork
from supervisor.decision import closing, remedy, transition
from supervisor.decision.decide import decide
from supervisor.hangs import detection, observation
from supervisor.view import interrupted_work
from supervisor.view.model import (
    Completion,
    End,
    Fault,
    InterruptedWork,
    JobState,
    MissedWork,
    OpenIncident,
    Policy,
    ResumePoint,
    Save,
    Secure,
    Settle,
    Start,
    View,
    VoidStep,
    Wait,
)
from tests.unit.supervisor.job_views import (
    S,
    fault,
    holding,
    launcher,
    member,
    memory,
    progress,
    rank,
    report,
    view,
)

POLICY = Policy(members=2)
KILLED = Ending(90 * S, None, 9)
LOST = Ending(95 * S, 1, fail="distributed", failed_ns=95 * S, message="Connection closed by peer")
RAISED = Ending(90 * S, 1, fail="exception", failed_ns=90 * S, message="RuntimeError: eval failed")


def at(number: int, step: int = 20, tail_s: float = 0.0, **given: Any) -> RankProgress:
    return replace(progress(number, step), tail_s=tail_s, **given)


def group(
    first: tuple[RankState, RankProgress],
    second: tuple[RankState, RankProgress],
    slots: tuple[int, ...] = (20, 15),
) -> View:
    """Return two members with a rank each, that hold whole states of `slots`, being secured since 100 s."""
    members = []
    for number, (state, where) in enumerate((first, second)):
        held = holding(f"m{number}", tuple((1, step) for step in slots), tuple((number, 1, s) for s in slots))
        assert held.report is not None
        told = replace(held.report, launcher=launcher(state), progress=(where,), secured_for=1)
        members.append(replace(held, report=told))
    opened = OpenIncident(1, 1, 90 * S, 91 * S, 0.0, (fault("crash", 1, 20),))
    return view(*members, phase="securing", since_ns=100 * S, incident=opened, incidents=1)


def later(found: View, seconds: float) -> View:
    return replace(found, now_ns=found.now_ns + int(seconds * S))


# -- waiting


def test_a_survivor_that_works_after_its_commit_is_waited_for() -> None:
    found = group((rank(0), at(0, tail_s=1.5)), (rank(1, KILLED), at(1)))
    action = decide(found, POLICY)
    assert action == Wait(160 * S, "waiting for rank 0 to finish work outside of a step")
    assert isinstance(decide(later(found, 61), POLICY), Start)  # the wait is limited


def test_without_remaining_work_nothing_is_waited_for() -> None:
    assert isinstance(decide(group((rank(0), at(0)), (rank(1, KILLED), at(1))), POLICY), Start)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(rank(0, where="collective"), id="it waits for the dead"),
        pytest.param(rank(0, state="failing"), id="it fails itself"),
        pytest.param(rank(0, Ending(95 * S, 1, fail="distributed")), id="it has failed"),
    ],
)
def test_a_rank_that_can_do_no_more_is_not_waited_for(state: RankState) -> None:
    assert (
        interrupted_work.wait_for_survivors(
            group((state, at(0, tail_s=1.5)), (rank(1, KILLED), at(1))), POLICY
        )
        is None
    )


def test_the_finally_blocks_of_a_rank_that_raised_are_waited_for() -> None:
    raising = replace(RAISED, unwinding=True)
    found = group((rank(0), at(0)), (rank(1, raising, state="failing"), at(1)))
    assert decide(found, POLICY) == Wait(130 * S, "waiting for rank 1 to finish work outside of a step")
    assert interrupted_work.wait_for_survivors(later(found, 31), POLICY) is None
    lost = replace(raising, fail="distributed")
    found = group((rank(0, lost, state="failing"), at(0)), (rank(1, KILLED), at(1)))
    assert (
        interrupted_work.wait_for_survivors(found, POLICY) is None
    )  # those of a victim are interrupted, as always
    over = group((rank(0), at(0)), (rank(1, RAISED), at(1)))
    assert interrupted_work.wait_for_survivors(over, POLICY) is None


HINT = replace(RAISED, unwinding=True, step=20)


def running(hint: Ending, where: RankProgress) -> View:
    found = group((rank(0), at(0)), (rank(1, hint, state="failing"), where))
    return replace(found, memory=replace(found.memory, phase="running", incident=None))


@pytest.mark.parametrize(
    ("hint", "where"),
    [
        pytest.param(HINT, at(1), id="no progress since"),
        pytest.param(replace(HINT, overdue=True), at(1, step=21), id="the rank has continued"),
        pytest.param(replace(HINT, overdue=True), at(1, pause_left_s=9.0), id="in a pause within its limit"),
    ],
)
def test_an_exception_that_may_still_be_handled_is_not_a_fault(hint: Ending, where: RankProgress) -> None:
    action = decide(running(hint, where), POLICY)
    assert isinstance(action, (Wait, Settle)), action


def test_an_exception_whose_blocks_do_not_end_in_time_is_a_fault() -> None:
    action = decide(running(replace(HINT, overdue=True), at(1)), POLICY)
    assert isinstance(action, Secure)
    assert [(each.kind, each.rank) for each in action.faults] == [("exception", 1)]
    ended = running(HINT, at(1))
    assert isinstance(decide(ended, POLICY), (Wait, Settle))


def test_while_an_exception_may_unwind_nothing_hangs_up_to_a_limit() -> None:
    found = running(HINT, at(1))
    late = RankStall(0, 1, 20, 1, 0, "forward", 3.0, 1.0)
    members = tuple(
        replace(each, report=replace(each.report, stalls=(replace(late, rank=number),)))
        for number, each in enumerate(found.members)
        if each.report is not None
    )
    found = replace(found, members=members)
    policy = replace(POLICY, hang_floor_s=1.0)
    found = replace(found, watch=observation.update(found.watch, found))
    for seconds, excused in ((0, True), (34, True), (36, False)):
        seen = later(found, seconds)
        seen = replace(seen, watch=observation.update(seen.watch, seen))
        verdict = detection.judge(seen, policy)
        assert verdict is not None
        assert ("finally" in verdict.why) == excused
    told = members[1].report
    assert told is not None
    on = replace(members[1], report=replace(told, launcher=launcher(rank(1))))
    handled = replace(found, members=(members[0], on))
    assert observation.update(found.watch, handled).hints == ()


def test_a_rank_that_hangs_in_this_work_is_not_waited_for() -> None:
    found = group((rank(0), at(0, tail_s=9.0)), (rank(1), at(1)))
    assert found.memory.incident is not None
    hung = replace(found.memory.incident, faults=(fault("hang", 0, 20),))
    assert (
        interrupted_work.wait_for_survivors(
            replace(found, memory=replace(found.memory, incident=hung)), POLICY
        )
        is None
    )


@pytest.mark.parametrize(
    ("named", "limited", "waited"),
    [(1, True, False), (-1, False, False), (1, False, True)],
    ids=["its own limit is over", "not told apart from it", "it is only late"],
)
def test_a_survivor_that_has_used_its_time_is_not_waited_for(named: int, limited: bool, waited: bool) -> None:
    found = group((rank(0), at(0, tail_s=9.0, phase="eval")), (rank(1), at(1, tail_s=9.0, phase="eval")))
    members = tuple(
        replace(each, report=replace(each.report, stalls=(late(number, limited),)))
        for number, each in enumerate(found.members)
        if each.report is not None
    )
    assert found.memory.incident is not None
    hung = replace(found.memory.incident, faults=(fault("hang", named, 20),))
    seen = replace(found, members=members, memory=replace(found.memory, incident=hung))
    assert (0 in ranks_waited_for(seen)) == waited


def late(number: int, limited: bool) -> RankStall:
    return RankStall(number, 1, 20, 6, 40, "eval", 9.0, 3.0, limited)


def ranks_waited_for(seen: View) -> tuple[int, ...]:
    action = interrupted_work.wait_for_survivors(seen, POLICY)
    return tuple(number for number in (0, 1) if action is not None and str(number) in action.why)


def test_a_declared_pause_gets_its_declared_time_up_to_a_bound() -> None:
    declared = group((rank(0), at(0, tail_s=1.5, pause_left_s=200.0)), (rank(1, KILLED), at(1)))
    assert decide(declared, POLICY) == Wait(300 * S, "waiting for rank 0 to finish work outside of a step")
    endless = group((rank(0), at(0, tail_s=1.5, pause_left_s=9e9)), (rank(1, KILLED), at(1)))
    assert decide(endless, POLICY) == Wait(700 * S, "waiting for rank 0 to finish work outside of a step")


# -- doing it again


def test_interrupted_work_is_repeated_from_before_its_step() -> None:
    found = group((rank(0), at(0)), (rank(1, KILLED), at(1, tail_s=2.0)))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (15, (InterruptedWork(1, 20, 19, 2.0),))
    assert "the work of rank 1 after the commit of step 20 (2.00 s) is repeated" in action.evidence
    assert transition.after(found, action, POLICY).missed == ()


@pytest.mark.parametrize(
    ("tail_s", "usual_s", "redone"),
    [(0.24, 0.0, False), (0.26, 0.0, True), (0.9, 0.2, False), (1.1, 0.2, True)],
)
def test_ordinary_work_after_a_commit_does_not_justify_a_rollback(
    tail_s: float, usual_s: float, redone: bool
) -> None:
    found = group((rank(0), at(0)), (rank(1, KILLED), at(1, tail_s=tail_s, tail_usual_s=usual_s)))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert action.resume.step == (15 if redone else 20)


@pytest.mark.parametrize(
    ("tail_s", "usual_s", "told_s"), [(0.02, 0.0, 0.02), (0.4, 0.4, 0.4), (1e-6, 0.0, 0.001)]
)
@pytest.mark.parametrize("ending", [KILLED, None], ids=["it was killed", "its time is over"])
def test_a_declared_pause_that_was_not_left_counts_as_work_whatever_its_usual_length(
    tail_s: float, usual_s: float, told_s: float, ending: Ending | None
) -> None:
    paused = at(1, tail_s=tail_s, tail_usual_s=usual_s, tail_declared=True)
    found = later(group((rank(0), at(0)), (rank(1, ending), paused)), 61)
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (15, (InterruptedWork(1, 20, 19, told_s),))
    assert f"the work of rank 1 after the commit of step 20 ({told_s:.2f} s) is repeated" in action.evidence


@pytest.mark.parametrize(("ahead", "cuts"), [(20, (InterruptedWork(1, 20, 19, 0.02),)), (21, ())])
def test_the_last_report_of_a_pause_does_not_count_if_the_others_have_gone_beyond_it(
    ahead: int, cuts: tuple[InterruptedWork, ...]
) -> None:
    """They could not have done so without this rank, so it has left that pause."""
    often = at(1, tail_s=0.02, tail_usual_s=0.02, tail_declared=True)
    found = group((rank(0), at(0, ahead)), (rank(1), often))
    lost = replace(found.members[1], exists=False, connected=False)
    seen = replace(found, members=(found.members[0], lost))
    assert interrupted_work.find(seen, ()) == cuts
    early = at(1, early=UncommittedWork(0.04, 0.03, declared=True))
    found = group((rank(0), at(0, 60)), (rank(1), early), slots=(60, 15))
    assert interrupted_work.find(found, ()) == (InterruptedWork(1, 20, 20, 0.04, early=True),)
    seen = replace(found, members=(found.members[0], replace(found.members[1], connected=False)))
    assert interrupted_work.find(seen, ()) == ()


def test_a_wait_for_peers_after_a_commit_is_not_lost_work() -> None:
    found = group((rank(0, where="collective"), at(0, tail_s=3.0)), (rank(1, KILLED), at(1)))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (20, ())


@pytest.mark.parametrize(
    ("state", "where"),
    [
        pytest.param(rank(0, where="collective"), at(0, tail_s=3.0, tail_declared=True), id="it waits"),
        pytest.param(rank(0, replace(LOST, paused=20)), at(0, tail_s=3.0), id="it failed there"),
        pytest.param(
            rank(0, replace(LOST, paused=20), where="collective"), at(0, tail_s=3.0), id="it was seen to wait"
        ),
        pytest.param(rank(0, Ending(95 * S, None, 6, paused=20)), at(0, tail_s=3.0), id="it aborted there"),
    ],
)
def test_the_rest_of_a_pause_behind_a_wait_for_peers_is_repeated(
    state: RankState, where: RankProgress
) -> None:
    found = group((state, where), (rank(1, KILLED), at(1)))
    assert not isinstance(decide(found, POLICY), Wait), "a rank that cannot continue must not be waited for"
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (15, (InterruptedWork(0, 20, 19, 3.0),))
    none = group((state, where), (rank(1, KILLED), at(1)), slots=(20,))
    action = decide(none, POLICY)
    assert isinstance(action, Start), (
        "no exception was raised, so the run continues and reports it at the end"
    )
    assert transition.after(none, action, POLICY).missed == (MissedWork(1, 0, 20),)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        pytest.param(rank(0, replace(LOST, paused=19)), at(0, tail_s=0.1), id="in an earlier step"),
        pytest.param(rank(0, LOST), at(0, tail_s=0.1), id="in no pause"),
        pytest.param(rank(0, replace(LOST, paused=20)), at(0), id="in a step that no member holds"),
    ],
)
def test_a_wait_for_peers_outside_a_pause_does_not_justify_a_rollback(
    state: RankState, where: RankProgress
) -> None:
    assert interrupted_work.find(group((state, where), (rank(1, KILLED), at(1))), ()) == ()


def test_a_pause_that_an_exception_left_is_repeated_if_others_have_the_step() -> None:
    failed = rank(1, replace(LOST, paused=20))
    found = group((rank(0), at(0, 21)), (failed, at(1)), slots=(21, 15))
    assert interrupted_work.find(found, ()) == (InterruptedWork(1, 20, 20, 0.001, early=True),)
    waits = rank(1, where="collective")
    found = group((rank(0), at(0, 21)), (waits, at(1, early=PAUSED)), slots=(21, 15))
    assert interrupted_work.find(found, ()) == (InterruptedWork(1, 20, 20, 0.04, early=True),)


def test_a_finished_rank_has_left_nothing_undone() -> None:
    found = group((rank(0, Ending(95 * S, 0)), at(0, tail_s=3.0)), (rank(1, KILLED), at(1)))
    assert interrupted_work.find(found, ()) == ()


# -- before a commit

SAVING = UncommittedWork(2.0, 0.001)  # between the optimizer and the commit
PAUSED = UncommittedWork(0.04, 0.001, declared=True, left_s=200.0)


@pytest.mark.parametrize(
    "work",
    [SAVING, PAUSED, UncommittedWork(0.04, 0.03, declared=True)],
    ids=["it is long", "it is declared", "it is declared in each step"],
)
def test_work_before_a_commit_that_others_have_made_is_repeated(work: UncommittedWork) -> None:
    found = group((rank(0), at(0, 21)), (rank(1, KILLED), at(1, early=work)), slots=(21, 15))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (15, (InterruptedWork(1, 20, 20, work.seconds, early=True),))
    said = f"the work of rank 1 in step 20 before its commit ({work.seconds:.2f} s) is repeated"
    assert said in action.evidence
    assert transition.after(found, action, POLICY).missed == ()
    before = group((rank(0), at(0, 21)), (rank(1, KILLED), at(1, early=work)), slots=(21, 20))
    action = decide(before, POLICY)
    assert isinstance(action, Start)
    assert action.resume.step == 20, "a state of the step itself is enough"


@pytest.mark.parametrize(
    ("state", "work"),
    [
        (rank(1, KILLED), None),
        (rank(1, KILLED), UncommittedWork(0.2, 0.001)),
        (rank(1, KILLED), UncommittedWork(0.9, 0.2)),
        (rank(1, Ending(90 * S, 1, fail="distributed")), SAVING),
        (rank(1, where="collective"), SAVING),
    ],
    ids=["a plain step", "it is short", "it is usual", "a peer was lost", "it waits"],
)
def test_a_step_in_progress_is_not_lost_work(state: RankState, work: UncommittedWork | None) -> None:
    found = group((rank(0), at(0, 21)), (state, at(1, early=work)), slots=(21, 15))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (21, ())


def test_if_no_member_has_the_step_its_work_is_not_reported() -> None:
    found = group((rank(0), at(0)), (rank(1, KILLED), at(1, early=SAVING)))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (20, ())
    assert (
        interrupted_work.wait_for_survivors(
            group((rank(0), at(0, early=PAUSED)), (rank(1, KILLED), at(1))), POLICY
        )
        is None
    )


def test_a_survivor_in_a_pause_before_its_commit_gets_its_declared_time() -> None:
    found = group((rank(0), at(0, early=PAUSED)), (rank(1, KILLED), at(1, 21)), slots=(21, 15))
    assert decide(found, POLICY) == Wait(300 * S, "waiting for rank 0 to finish work outside of a step")
    action = decide(later(found, 201), POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, [each.rank for each in action.cut]) == (15, [0])


def test_work_before_a_commit_without_an_earlier_state_is_reported_at_the_end() -> None:
    found = group((rank(0), at(0, 21)), (rank(1, KILLED), at(1, early=SAVING)), slots=(21,))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert action.resume.step == 21
    after = transition.after(found, action, POLICY)
    assert after.missed == (MissedWork(1, 1, 20, early=True),)
    end = closing.finished(replace(found, memory=after), POLICY)
    assert isinstance(end, End)
    assert end.exit_code == 3
    assert "work before commit was cut short 1 time: rank 1 in step 20 (see" in end.why
    both = (*after.missed, MissedWork(2, 0, 40))
    assert interrupted_work.describe(both).startswith("work before or after commit was cut short 2 times: ")
    for step, left in ((20, ()), (21, after.missed)):
        back = replace(action, resume=replace(action.resume, step=step), cut=())
        known = replace(found.memory, missed=after.missed)
        assert transition.after(replace(found, memory=known), back, POLICY).missed == left


def test_a_stop_during_work_before_a_commit_saves_a_state_that_leads_to_it_again() -> None:
    found = group((rank(0), at(0, 21)), (rank(1), at(1, early=SAVING)), slots=(21, 15))
    stopped = replace(found, memory=replace(found.memory, stop="graceful", incident=None))
    assert isinstance(decide(stopped, POLICY), Wait)
    action = decide(later(stopped, POLICY.grace_s + 1), POLICY)
    assert isinstance(action, Save)
    assert (action.resume.step, action.cut) == (15, (InterruptedWork(1, 20, 20, 2.0, early=True),))


# -- where no state is left


def test_without_an_earlier_state_the_run_continues_and_reports_the_loss() -> None:
    found = group((rank(0), at(0)), (rank(1, KILLED), at(1, tail_s=2.0)), slots=(20,))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert action.resume.step == 20
    [line] = action.evidence
    assert line.endswith("is not repeated, because no earlier state is left")
    after = transition.after(found, action, POLICY)
    assert after.missed == (MissedWork(1, 1, 20),)
    assert closing.finished(replace(found, memory=after), POLICY) == End(
        3,
        "all ranks have finished; work after commit was cut short 1 time: rank 1 after step 20 "
        "(see holdfast explain 1)",
    )


def test_a_hang_in_a_pause_without_an_earlier_state_is_reported_at_the_end() -> None:
    """All ranks evaluate beyond their declared limit, and only the state of that step is left."""
    hung = at(0, tail_s=3.1, phase="eval")
    found = group((rank(0), hung), (rank(1), replace(hung, rank=1)), slots=(20,))
    members = tuple(
        replace(each, report=replace(each.report, stalls=(late(number, True),)))
        for number, each in enumerate(found.members)
        if each.report is not None
    )
    assert found.memory.incident is not None
    opened = replace(found.memory.incident, faults=(fault("hang", 0, 20),))
    seen = replace(found, members=members, memory=replace(found.memory, incident=opened))
    action = decide(seen, POLICY)
    assert isinstance(action, Start)
    assert action.resume.step == 20
    after = transition.after(seen, action, POLICY)
    assert after.missed == (MissedWork(1, 0, 20), MissedWork(1, 1, 20))
    ended = closing.finished(replace(seen, memory=after), POLICY)
    assert isinstance(ended, End)
    assert ended.exit_code == exit_codes.CUT_SHORT
    again = ResumePoint(15, 1, "slot")  # a later fault went back to before it, so it is done again
    secured = replace(seen, memory=replace(after, phase="securing"))
    assert transition.after(secured, replace(action, resume=again, cut=()), POLICY).missed == ()


# -- state that was changed after its commit


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        pytest.param({"late": (20,)}, {"late": (20,)}, 15, id="no copy has the change"),
        pytest.param({"late": (20,)}, {}, 15, id="one rank's copy lacks the change"),
        pytest.param({"amended": (20,)}, {"amended": (20,)}, 20, id="all copies have it"),
        pytest.param({"amended": (20,)}, {}, 15, id="one may not have it"),
        pytest.param({"amended": (10, 20)}, {"amended": (10, 19)}, 15, id="one may still be making it"),
        pytest.param({"amended": (20,)}, {"step": 19}, 20, id="the other never reached the step"),
        pytest.param({"amended": (20,)}, {"amended": (21,), "step": 21}, 20, id="the other has forgotten it"),
        pytest.param({"late": (10, 19)}, {"late": (10, 19)}, 20, id="another step was changed"),
    ],
)
def test_a_state_that_lacks_changes_after_its_commit_is_skipped(
    first: dict[str, Any], second: dict[str, Any], step: int
) -> None:
    found = group((rank(0), at(0, **first)), (rank(1, KILLED), at(1, **second)))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (step, ())
    said = "the state of step 20 was changed after its commit and is not used"
    assert (said in action.evidence) == (step == 15)
    stopped = closing.save_and_end(found, ())
    assert isinstance(stopped, Save)
    assert (stopped.resume.step, stopped.cut) == (step, ())


def test_a_remembered_void_step_is_skipped_in_all_generations() -> None:
    found = group((rank(0), at(0)), (rank(1, KILLED), at(1)))
    for void, step in ((VoidStep(1, 20, 1), 15), (VoidStep(2, 20, 1), 20), (VoidStep(1, 19, 1), 20)):
        action = decide(replace(found, memory=replace(found.memory, void=(void,))), POLICY)
        assert isinstance(action, Start)
        assert action.resume.step == step
    resumed = ResumePoint(20, 1, "slot")
    known = replace(found, memory=replace(found.memory, void=(VoidStep(1, 20, 1),)))
    assert interrupted_work.lost_changes(known, resumed) == (InterruptedWork(1, 20, 19),)


@pytest.mark.parametrize(
    ("publishing", "first", "second", "void", "good"),
    [
        pytest.param(20, {"step": 21}, {"step": 21}, (), 20, id="all have gone beyond it"),
        pytest.param(20, {"step": 21}, {"step": 20}, (), -1, id="one may be in work after that commit"),
        pytest.param(20, {"step": 21}, {"step": 22, "late": (20,)}, (), -1, id="one has made it void"),
        pytest.param(
            20, {"step": 21}, {"step": 22}, (VoidStep(1, 20, 1),), -1, id="one made it void earlier"
        ),
        pytest.param(-1, {"step": 21}, {"step": 22}, (), -1, id="no member asks"),
    ],
)
def test_a_member_may_write_a_checkpoint_that_no_rank_can_make_void_any_more(
    publishing: int, first: dict[str, Any], second: dict[str, Any], void: tuple[VoidStep, ...], good: int
) -> None:
    found = group((rank(0), at(0, **first)), (rank(1), at(1, **second)))
    asks = found.members[0]
    assert asks.report is not None
    asks = replace(asks, report=replace(asks.report, publishing=publishing))
    found = replace(found, memory=replace(found.memory, void=void), members=(asks, *found.members[1:]))
    assert interrupted_work.publishable_step(found, asks) == good
    assert interrupted_work.publishable_step(replace(found, members=(asks,)), asks) == -1, (
        "the other's ranks are not known"
    )


def test_a_change_without_an_earlier_state_is_reported_as_missing() -> None:
    found = group((rank(0), at(0, late=(20,))), (rank(1, KILLED), at(1)), slots=(20,))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert (action.resume.step, action.cut) == (20, (InterruptedWork(0, 20, 19),))
    assert transition.after(found, action, POLICY).missed == (MissedWork(1, 0, 20),)
    stopped = closing.save_and_end(found, ())
    assert isinstance(stopped, Save)
    assert stopped.cut == (InterruptedWork(0, 20, 19),)


# -- exceptions


def raised(tail_s: float, slots: tuple[int, ...], ahead: int = 20) -> tuple[View, tuple[Fault, ...]]:
    found = group((rank(0), at(0, step=ahead)), (rank(1, RAISED), at(1, tail_s=tail_s)), slots)
    return found, (fault("exception", 1, 20, message="RuntimeError: eval failed"),)


def test_an_exception_after_a_commit_is_rolled_back_however_short_the_work() -> None:
    found, faults = raised(0.001, (20, 15))
    action = remedy.start_generation(found, POLICY, faults[0], faults)
    assert isinstance(action, Start)
    assert action.resume.step == 15


def test_an_exception_after_a_commit_without_an_earlier_state_ends_the_run() -> None:
    found, faults = raised(0.001, (20,))
    action = remedy.start_generation(found, POLICY, faults[0], faults)
    assert isinstance(action, End)
    assert (action.exit_code, action.message) == (1, "RuntimeError: eval failed")


def test_an_exception_within_a_step_that_others_have_done_is_rolled_back() -> None:
    """It came between the optimizer's step and the commit, so the others' state already has that step."""
    found, faults = raised(0.0, (21, 15), ahead=21)
    action = remedy.start_generation(found, POLICY, faults[0], faults)
    assert isinstance(action, Start)
    assert action.resume.step == 15
    found, faults = raised(0.0, (20, 15))
    action = remedy.start_generation(found, POLICY, faults[0], faults)
    assert isinstance(action, Start)
    assert action.resume.step == 20  # as always


def test_a_distributed_error_is_not_an_exception_of_the_script() -> None:
    lost = Ending(91 * S, 1, fail="distributed", failed_ns=91 * S)
    found = group((rank(0, lost), at(0, tail_s=0.01)), (rank(1, KILLED), at(1)))
    action = decide(found, POLICY)
    assert isinstance(action, Start)
    assert action.resume.step == 20


# -- the same again


@pytest.mark.parametrize(("name", "tries"), [("TypeError", 2), ("ImportError", 2), ("OSError", 3)])
def test_a_program_error_before_any_step_is_not_retried_for_long(name: str, tries: int) -> None:
    cause = fault("exception", 1, 0, signature=f"exception {name} at train.py:3", at_ns=1)
    lone = (member("m0", report("m0", launcher(rank(0)))), member("m1", report("m1", launcher(rank(1)))))
    history = memory().history
    for again in range(1, tries + 1):
        seen = view(*lone, now_s=2.0, phase="securing", history=history)
        assert (remedy.reason_to_stop(seen, POLICY, cause) is not None) == (again == tries)
        action = remedy.start_generation(seen, POLICY, cause, (cause,))
        assert isinstance(action, Start)
        history = transition.after(seen, action, POLICY).history


def test_after_training_a_program_error_is_retried_like_any_other() -> None:
    cause = fault("exception", 1, 7, signature="exception TypeError at train.py:3")
    past = replace(apply_once(cause).history[-1], worked=True)
    assert remedy.reason_to_stop(view(now_s=2.0, history=(past,)), POLICY, cause) is None


def apply_once(cause: Fault) -> JobState:
    lone = (member("m0", report("m0", launcher(rank(0)))), member("m1", report("m1", launcher(rank(1)))))
    seen = view(*lone, now_s=2.0, phase="securing")
    action = remedy.start_generation(seen, POLICY, cause, (cause,))
    assert isinstance(action, Start)
    return transition.after(seen, action, POLICY)


# -- the last line


@pytest.mark.parametrize(
    ("why", "completion", "incidents", "line"),
    [
        ("all ranks have finished", None, 0, "all ranks have finished"),
        ("all ranks have finished", None, 1, "all ranks have finished after 1 incident"),
        (
            "all ranks have finished; work",
            Completion(notes=("work",)),
            3,
            "all ranks have finished after 3 incidents; work",
        ),
        ("all ranks have finished; work", None, 1, "all ranks have finished; work (1 incident)"),
        ("stopped as requested", None, 2, "stopped as requested (2 incidents)"),
    ],
)
def test_the_last_line_states_the_number_of_incidents(
    why: str, completion: Completion | None, incidents: int, line: str
) -> None:
    ended = memory(why=why, completion=completion, incidents=5 + incidents, before=5)
    assert closing.summary(ended) == line


def test_work_interrupted_many_times_is_named_in_part() -> None:
    missed = tuple(MissedWork(number, 0, 100 * number) for number in range(1, 6))
    ended = closing.finished(view(missed=missed), POLICY)
    assert isinstance(ended, End)
    assert ended.exit_code == 3
    assert (
        "cut short 5 times: rank 0 after step 100, rank 0 after step 200, rank 0 after step 300 and 2 more"
        in ended.why
    )


def test_a_stopping_run_waits_at_most_its_grace_and_reports_what_it_interrupted() -> None:
    found = group((rank(0), at(0, tail_s=1.5, pause_left_s=500.0)), (rank(1), at(1)))
    asked = replace(found, memory=replace(found.memory, stop="graceful", incident=None))
    assert decide(asked, POLICY) == Wait(130 * S, "waiting for rank 0 to finish work outside of a step")
    assert interrupted_work.wait_for_survivors(later(asked, 31), POLICY) is None
    ended = transition.after(
        later(asked, 31), End(130, "stopped as requested, with a checkpoint of step 20"), POLICY
    )
    assert closing.summary(replace(ended, incidents=0)) == (
        "stopped as requested, with a checkpoint of step 20; work after commit was cut short 1 time: "
        "rank 0 after step 20"
    )
