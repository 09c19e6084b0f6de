"""The verdict about a group without progress, from its members' reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, RankInspection, StartTimes
from holdfast.protocol.member_messages import MemberReport, RankStall
from supervisor.hangs import certain_hangs, detection, observation, sentences, stall_limits, verdict
from supervisor.hangs.verdict import UNBEGUN, StallVerdict
from supervisor.view.model import LearnedStall, MemberView, PastFault, Policy, StallWatch, View
from tests.unit.supervisor.hangs.test_evidence import LOCKED, PLAIN, REDUCING
from tests.unit.supervisor.job_views import S, launcher, member, progress, rank, report, view

POLICY = Policy(members=2)
WAITS = replace(PLAIN, stack=REDUCING, where="<module> (train.py:9)")
STOPPED = replace(PLAIN, process_state="T")
SLEEPS = replace(PLAIN, calls=("sleep",))
LATE_S = 2.0  # since the last progress


def there(number: int, inspection: RankInspection | None, **given: Any) -> MemberView:
    """Return the member of a late rank with this inspection. `phase` is the phase on its page."""
    phase, stalled = given.pop("phase", "forward"), given.pop("stalled", True)
    limited, late_s = given.pop("limited", False), given.pop("late_s", LATE_S)
    marks = StartTimes(first_step_ns=0 if given.pop("first_step", False) else 1)
    state = rank(number, given.pop("ending", None), stopped=given.pop("stopped", False), marks=marks)
    at_s, begun = given.pop("at_s", 0.6), given.pop("begun", True)
    stall = RankStall(number, 1, 5, 3, 0, phase, late_s, at_s, limited, begun, given.pop("early_s", 0.0))
    step = given.pop("step", 5)
    stall = replace(stall, step=step, first_step=not marks.first_step_ns)
    inspections = (
        () if inspection is None else (replace(inspection, rank=number, number=given.pop("turn", 1)),)
    )
    told = report(
        f"m{number}",
        launcher(state),
        progress=(replace(progress(number, step), phase=phase),),
        stalls=(stall,) if stalled else (),
        looks=inspections,
        looked_for=1,
    )
    return member(f"m{number}", replace(told, **given))


def judged(*members: MemberView, policy: Policy = POLICY, **given: Any) -> StallVerdict | None:
    return detection.judge(seen(*members, **given), policy)


def seen(*members: MemberView, watch: StallWatch | None = None, **given: Any) -> View:
    now = view(*members, **{"settled": True, **given})
    return replace(now, watch=observation.update(watch or StallWatch(1), now))


def certain(found: StallVerdict | None) -> int:
    assert found is not None
    assert found.fault is not None
    assert found.act_ns is not None
    assert found.act_ns <= 100 * S
    return found.fault.rank


def waits_on(found: StallVerdict | None) -> float:
    """Return the limit of a verdict that is still undecided."""
    assert found is not None
    assert found.act_ns is not None
    assert found.act_ns > 100 * S
    assert found.limit_s is not None
    return found.limit_s


def test_without_a_late_rank_nothing_is_judged() -> None:
    assert judged(there(0, None, stalled=False), there(1, None, stalled=False)) is None


@pytest.mark.parametrize("inspection", [STOPPED, LOCKED], ids=["stopped", "locked"])
def test_a_certain_hang_is_acted_on_at_once_and_its_rank_is_named(inspection: RankInspection) -> None:
    assert certain(judged(there(0, WAITS), there(1, inspection))) == 1
    assert certain(judged(there(0, inspection), there(1, WAITS))) == 0


def test_a_certain_hang_waits_briefly_for_the_stacks_of_the_other_ranks() -> None:
    found = judged(there(0, None), there(1, STOPPED, late_s=0.7), there(0, None))
    assert found is not None
    assert found.act_ns is not None
    assert 100 * S < found.act_ns <= 100 * S + int(certain_hangs.OTHERS_INSPECTED_S * S)


EARLY: dict[str, Any] = {"early_s": 5.0, "late_s": 6.0, "at_s": 61.0}  # after a slow step in the past


def judged_twice(*inspections: RankInspection, policy: Policy = POLICY) -> StallVerdict | None:
    """Return the verdict about ranks that are early, after two equal inspections of each."""
    first = seen(*(there(number, each, **EARLY) for number, each in enumerate(inspections)))
    again = (there(number, each, turn=2, **EARLY) for number, each in enumerate(inspections))
    return judged(*again, policy=policy, watch=first.watch)


def test_a_certain_hang_does_not_wait_for_a_limit_that_one_slow_step_has_made_longer() -> None:
    assert certain(judged_twice(WAITS, LOCKED)) == 1
    assert certain(judged_twice(LOCKED, LOCKED)) == -1
    assert certain(judged_twice(WAITS, LOCKED, policy=replace(POLICY, hang_floor_s=30.0))) == 1
    once = judged(there(0, WAITS, **EARLY), there(1, LOCKED, **EARLY))
    assert waits_on(once) == 61.0, "one inspection does not show that the rank stays where it is"


@pytest.mark.parametrize("inspection", [SLEEPS, WAITS, PLAIN], ids=["sleeps", "waits", "idle"])
def test_an_early_rank_that_may_work_is_restarted_no_sooner_than_its_own_limit(
    inspection: RankInspection,
) -> None:
    assert waits_on(judged_twice(WAITS, inspection)) == 61.0
    patient = replace(POLICY, stall_limit_s=70.0)
    assert waits_on(judged_twice(WAITS, inspection, policy=patient)) == 70.0
    hasty = replace(POLICY, stall_limit_s=10.0)
    assert waits_on(judged_twice(WAITS, inspection, policy=hasty)) == 61.0


def test_before_the_floor_that_the_user_sets_an_early_rank_is_not_hung() -> None:
    found = judged_twice(WAITS, SLEEPS, policy=replace(POLICY, hang_floor_s=30.0))
    assert found is not None
    assert (found.act_ns, found.fault, found.limit_s) == (None, None, 61.0)


def test_a_rank_that_waits_for_an_early_one_is_restarted_no_sooner_than_its_own_limit() -> None:
    """The early rank's own step times may be longer: rank 0 evaluates, and the others wait for it."""
    members = (
        there(0, WAITS, early_s=5.0, late_s=6.0, at_s=200.0),
        there(1, SLEEPS, early_s=5.0, late_s=6.0, at_s=3.0),
    )
    assert waits_on(judged(*members)) == 200.0


def test_a_lock_on_all_ranks_is_certain_and_no_rank_is_blamed_at_random() -> None:
    found = judged(there(0, LOCKED), there(1, LOCKED))
    assert certain(found) == -1
    assert found is not None
    assert found.fault is not None
    assert found.fault.member == ""


@pytest.mark.parametrize("phase", ["eval", "checkpoint", "paused", "snapshot"])
def test_while_any_rank_is_in_a_pause_within_its_limit_no_rank_hangs(phase: str) -> None:
    """This includes a stopped rank: no other rank waits for it yet."""
    for other, stopped in ((WAITS, False), (LOCKED, False), (STOPPED, False), (STOPPED, True)):
        there_1 = there(1, other, stopped=stopped)
        found = judged(there(0, SLEEPS, phase=phase, stalled=False), there_1)
        assert found is not None
        assert found.act_ns is None
        assert found.rank == 0


PHASES = ["joining", "restoring", "data", "forward", "backward", "optimizer", "tail", "eval", "checkpoint"]
PHASES += ["paused", "snapshot", "idle", "done"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_stays_stopped_hangs_whatever_it_does_and_even_if_none_is_late(
    phase: str,
) -> None:
    stopped = there(1, None, stalled=False, stopped=True, phase=phase, first_step=True)
    other = there(0, None, stalled=False, first_step=True)
    before = seen(other, stopped)
    found = detection.judge(before, POLICY)
    assert found is not None
    assert found.act_ns == before.now_ns + int(certain_hangs.STOPPED_S * S), (
        "it must wait for an inspection of the others"
    )
    now = replace(before, now_ns=found.act_ns)
    now = replace(now, watch=observation.update(before.watch, now))
    again = detection.judge(now, POLICY)
    assert again is not None
    assert again.fault is not None
    assert (again.fault.kind, again.fault.rank, again.act_ns) == ("hang", 1, now.now_ns)
    assert "rank 1 hangs: it is stopped (state T)" in again.why
    looked = (there(0, WAITS, stalled=False), there(1, STOPPED, stalled=False, stopped=True, phase=phase))
    assert certain(judged(*looked)) == 1


def test_a_rank_that_never_began_and_is_stopped_is_a_certain_hang() -> None:
    told = launcher(rank(1, state="starting", stopped=True))
    found = judged(there(0, None, stalled=False), member("m1", report("m1", told)))
    assert found is not None
    assert found.fault is not None
    assert (found.fault.rank, found.fault.step) == (1, -1)


def test_a_continued_rank_is_forgotten() -> None:
    before = seen(there(0, None, stalled=False), there(1, None, stalled=False, stopped=True))
    after = seen(there(0, None, stalled=False), there(1, None, stalled=False), watch=before.watch)
    assert detection.judge(after, POLICY) is None


def test_a_stopped_rank_is_certain_while_another_in_a_pause_waits_for_it() -> None:
    stopped = there(1, STOPPED, stalled=False, stopped=True, phase="eval")
    assert certain(judged(there(0, WAITS, stalled=False, phase="eval"), stopped)) == 1
    moved_on = replace(WAITS, step=4)
    found = judged(there(0, moved_on, stalled=False, phase="eval"), stopped)
    assert found is not None
    assert found.act_ns is None, "the inspection is older than the pause"


def test_nothing_is_certain_while_a_debugger_is_attached_to_another_rank() -> None:
    traced = there(0, replace(PLAIN, traced=True), stalled=False)
    found = judged(traced, there(1, STOPPED, stopped=True))
    assert found is not None
    assert (found.act_ns, found.why) == (None, "a debugger is attached to rank 0")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"phase": "joining"}, "is joining the group, in evaluate (train.py:42), which may take until"),
        ({"phase": "restoring"}, "is restoring its state, in evaluate (train.py:42), which may take until"),
        ({"first_step": True}, "is in its first step, in evaluate (train.py:42), which may take until"),
        ({}, "is in the forward phase of its own step, in evaluate (train.py:42), and is not late yet"),
        ({"phase": "eval"}, "is in an evaluation that the script declared, in evaluate (train.py:42), until"),
        ({"phase": "snapshot"}, "is copying its state for Holdfast"),
    ],
)
def test_the_rank_that_the_group_waits_for_is_named_with_its_place_and_limit(
    given: dict[str, Any], says: str
) -> None:
    found = judged(there(0, WAITS), there(1, SLEEPS, stalled=False, **given))
    assert found is not None
    assert found.why.startswith(f"rank 1 {says}")
    if "may take until" in says:
        assert found.why.endswith("until --first-step-timeout (600 s)")


def test_a_script_that_does_not_join_is_reported_to_have_done_no_optimizer_step() -> None:
    given: dict[str, Any] = {"phase": "joining", "first_step": True, "stalled": False}
    own, others = replace(progress(1, 0, -1), phase="joining"), replace(progress(0, 0, -1))
    given |= {"launcher": launcher(rank(1, marks=StartTimes()), joins=False), "progress": (own,)}
    found = judged(there(0, WAITS, progress=(others,)), there(1, SLEEPS, **given))
    assert found is not None
    assert found.why.startswith(
        "rank 1 has completed no optimizer step yet, in evaluate (train.py:42), which may"
    )


def test_ranks_in_a_first_step_that_wait_for_one_that_has_left_do_not_get_its_full_limit() -> None:
    left = there(1, None, stalled=False, ending=Ending(1, 0))
    meets = replace(WAITS, at="all_reduce (torch/distributed/distributed_c10d.py:9)")
    before = seen(there(0, meets, stalled=False, first_step=True), left)
    found = detection.judge(before, POLICY)
    assert found is not None
    assert found.act_ns == before.now_ns + int(certain_hangs.PEER_LEFT_S * S)
    assert found.fault is not None
    assert (found.fault.rank, found.fault.kind) == (1, "crash")
    for other in (SLEEPS, WAITS, replace(meets, moved=True)):  # works, waits for a device, or makes progress
        first = seen(there(0, other, stalled=False, first_step=True), left)
        later = replace(first, now_ns=first.now_ns + int(2 * certain_hangs.PEER_LEFT_S * S))
        again = there(0, replace(other, phase_seq=2), turn=2, stalled=False, first_step=True)
        later = replace(later, members=(again, left))
        later = replace(later, watch=observation.update(first.watch, later))
        found = detection.judge(later, POLICY)
        assert found is not None
        assert found.act_ns is None or found.act_ns > later.now_ns


@pytest.mark.parametrize("state", ["X", "Z"])
def test_ended_ranks_whose_exits_are_not_yet_reported_do_not_hang(state: str) -> None:
    """All ranks had done their last step and exited with 0, but the launcher reported this late."""
    ended = replace(PLAIN, process_state=state)
    assert waits_on(judged(there(0, ended), there(1, ended))) > 1.0


def test_a_pause_over_its_limit_is_a_hang_of_that_rank() -> None:
    found = judged(there(0, None, phase="eval", limited=True), there(1, WAITS))
    assert certain(found) == 0


def test_a_first_step_beyond_its_limit_does_not_cut_off_a_pause_of_another_rank() -> None:
    found = judged(there(0, None, phase="eval", stalled=False), there(1, WAITS, limited=True))
    assert found is not None
    assert found.act_ns is None


def test_while_any_rank_is_within_its_limit_possible_work_is_not_a_hang() -> None:
    found = judged(there(0, None, stalled=False), there(1, SLEEPS))
    assert found is not None
    assert found.act_ns is None


def test_a_rank_between_two_loops_has_the_limit_of_its_work_while_another_waits_for_its_step() -> None:
    works = replace(PLAIN, moved=True)
    idle = there(0, works, phase="idle", stalled=False)
    before = seen(idle, there(1, WAITS))
    now = replace(before, now_ns=150 * S)
    now = replace(now, watch=observation.update(before.watch, now))
    found = detection.judge(now, POLICY)
    assert found is not None
    assert (found.rank, found.work) == (0, "computing")
    assert found.act_ns is not None
    assert found.act_ns > now.now_ns


@pytest.mark.parametrize("inspection", [replace(PLAIN, traced=True), replace(PLAIN, process_state="t")])
def test_a_rank_in_a_debugger_never_hangs(inspection: RankInspection) -> None:
    for other in (WAITS, LOCKED):
        found = judged(there(0, other), there(1, inspection, late_s=5000.0))
        assert found is not None
        assert found.act_ns is None


def test_possible_work_has_its_limit_since_the_last_progress() -> None:
    found = judged(there(0, SLEEPS), there(1, WAITS))
    assert waits_on(found) == 60.0
    assert found is not None
    assert (found.rank, found.work, found.place) == (0, "sleep", "evaluate (train.py)")
    assert (found.act_ns, found.warn_ns) == (158 * S, 128 * S)


def test_observed_work_extends_the_limit_up_to_ten_times() -> None:
    works = replace(PLAIN, moved=True)
    assert waits_on(judged(there(0, works, late_s=40.0), there(1, WAITS, late_s=40.0))) == 100.0
    late = judged(there(0, works, late_s=590.0), there(1, WAITS, late_s=590.0))
    assert waits_on(late) == 600.0
    assert certain(judged(there(0, works, late_s=601.0), there(1, WAITS, late_s=601.0))) == 0


def test_a_rank_that_computes_without_progress_has_three_times_the_limit() -> None:
    spins = replace(PLAIN, cpu_s=0.2)
    assert waits_on(judged(there(0, spins), there(1, WAITS))) == 180.0


def test_a_stall_that_ended_by_itself_sets_the_expected_duration_of_its_kind() -> None:
    given: dict[str, Any] = {"learned": (LearnedStall("sleep", 50.0), LearnedStall("a file system", 500.0))}
    assert waits_on(judged(there(0, SLEEPS), there(1, WAITS), **given)) == 150.0


def test_a_stall_restarted_at_the_same_place_gets_twice_the_limit() -> None:
    past = PastFault("hang", 0, "m0", 3, "stall", 0, 1, place="evaluate (train.py)", work="sleep")
    elsewhere = replace(past, place="load (data.py)")
    assert waits_on(judged(there(0, SLEEPS), there(1, WAITS), history=(past, elsewhere, past))) == 240.0


def test_a_stall_restarted_at_an_unknown_place_or_the_same_step_gets_twice_the_limit() -> None:
    """Ranks that look alike have no place, and each inspection of a working rank shows another function."""
    works = replace(PLAIN, cpu_s=0.2)
    untold = PastFault("hang", -1, "", 3, "stall", 0, 1, work="computing")
    elsewhere = PastFault("hang", 1, "m1", 5, "stall", 0, 1, place="load (data.py)", work="computing")
    for past in (untold, elsewhere):
        assert waits_on(judged(there(0, works), there(1, works), history=(past,))) == 360.0
        assert waits_on(judged(there(0, works), there(1, WAITS), history=(past, past))) == 720.0
    certain_then = replace(untold, work="")
    assert waits_on(judged(there(0, works), there(1, works), history=(certain_then,))) == 180.0
    other = replace(elsewhere, step=3)
    assert waits_on(judged(there(0, works), there(1, WAITS), history=(other,))) == 180.0


def unbegun(number: int, inspection: RankInspection, late_s: float, **given: Any) -> MemberView:
    """Return the member of a rank whose script has not joined, and that has done no step for `late_s`."""
    return there(
        number, inspection, **{"phase": "joining", "begun": False, "late_s": late_s, "at_s": 300.0, **given}
    )


WORKS = replace(PLAIN, moved=True)
SPINS = replace(PLAIN, cpu_s=0.2)
ONE: dict[str, Any] = {"placement": ("m0",), "world_size": 1}


@pytest.mark.parametrize("inspection", [WORKS, SPINS, SLEEPS], ids=["works", "computes", "sleeps"])
@pytest.mark.parametrize("late_s", [301.0, 100_000.0])
def test_a_single_rank_that_has_never_done_a_step_is_never_restarted_for_that(
    inspection: RankInspection, late_s: float
) -> None:
    found = judged(unbegun(0, inspection, late_s), **ONE)
    assert found is not None
    assert (found.act_ns, found.fault) == (None, None)
    assert certain(judged(unbegun(0, LOCKED, late_s), **ONE)) == 0
    assert certain(judged(unbegun(0, STOPPED, late_s), **ONE)) == 0


@pytest.mark.parametrize("inspection", [WORKS, SPINS], ids=["works", "computes"])
@pytest.mark.parametrize("late_s", [301.0, 100_000.0])
def test_a_group_that_has_never_done_a_step_has_the_limit_of_one_from_its_last_sign_of_work(
    inspection: RankInspection, late_s: float
) -> None:
    found = judged(unbegun(0, inspection, late_s), unbegun(1, WAITS, late_s))
    assert waits_on(found) == late_s + 600.0
    assert found is not None
    assert found.warn_ns is not None
    assert found.warn_ns <= (100 - late_s + 300) * S, "the warning is due at half of the time"
    hang_floor = replace(POLICY, hang_floor_s=5.0)
    assert (
        waits_on(judged(unbegun(0, inspection, late_s), unbegun(1, WAITS, late_s), policy=hang_floor)) > 600.0
    )


def test_a_group_without_a_step_and_without_signs_of_work_is_restarted_at_the_limit_of_a_step() -> None:
    for inspection in (SLEEPS, WAITS, replace(WAITS, cpu_s=0.2)):
        assert waits_on(judged(unbegun(0, inspection, 590.0), unbegun(1, WAITS, 590.0))) == 600.0
        found = judged(unbegun(0, inspection, 601.0), unbegun(1, WAITS, 601.0))
        certain(found)
        assert found is not None
        assert found.fault is not None
        assert found.fault.work, "it must not count as the same failure"
    for inspection in (LOCKED, STOPPED):
        assert certain(judged(unbegun(0, inspection, 301.0), unbegun(1, WAITS, 301.0))) == 0


def test_ranks_that_have_never_done_a_step_and_do_not_wait_for_each_other_are_left_alone() -> None:
    """They may serve requests and receive none."""
    found = judged(unbegun(0, SLEEPS, 100_000.0), unbegun(1, SLEEPS, 100_000.0))
    assert found is not None
    assert (found.act_ns, found.fault, found.place) == (None, None, UNBEGUN)
    for inspection in (LOCKED, STOPPED):
        assert certain(judged(unbegun(0, inspection, 301.0), unbegun(1, inspection, 301.0))) in (-1, 0)


def test_the_warning_before_a_first_step_names_the_option_and_what_is_not_visible() -> None:
    now = seen(unbegun(0, SLEEPS, 301.0), unbegun(1, WAITS, 301.0))
    found = detection.judge(now, POLICY)
    assert found is not None
    assert sentences.warning(now, found) == (
        "rank 0 has been in evaluate (train.py:42) (sleeping) since step 5: no step of a torch.optim"
        " optimizer for 301 s; Holdfast restarts it at 600 s (--first-step-timeout) unless it shows signs of"
        " work. If the script does no such steps, or waits long before the first, use a larger"
        " --first-step-timeout"
    )
    alone = seen(unbegun(0, WORKS, 301.0), **ONE)
    found = detection.judge(alone, POLICY)
    assert found is not None
    assert "leaves it alone" in sentences.warning(alone, found)
    elsewhere = detection.judge(seen(unbegun(0, replace(WORKS, where="run (a.py:1)"), 301.0), **ONE), POLICY)
    assert elsewhere is not None
    assert elsewhere.place == found.place, "the warning must be given once"


def test_a_long_start_is_not_learned_for_later_stalls() -> None:
    before = seen(unbegun(0, SLEEPS, 400.0), unbegun(1, WAITS, 400.0)).watch
    over = seen(there(0, None, stalled=False), there(1, None, stalled=False), watch=before).watch
    assert over.passed == ()


def test_a_rank_that_is_late_only_after_minutes_has_minutes_from_its_last_sign_of_work() -> None:
    """With steps of minutes, the limit for work has passed before the first inspection."""
    slow = {"late_s": 601.0, "at_s": 600.0}
    assert waits_on(judged(there(0, WORKS, **slow), there(1, WAITS, **slow))) == 1201.0
    assert certain(judged(there(0, SLEEPS, **slow), there(1, WAITS, **slow))) == 0


def test_a_lock_that_recurs_at_the_same_step_has_the_limit_of_work() -> None:
    past = PastFault("hang", 0, "m0", 5, "hang", 0, 1, place="evaluate (train.py)")
    found = judged(there(0, LOCKED), there(1, WAITS), history=(past,))
    assert waits_on(found) == 120.0
    assert found is not None
    assert found.fault is not None
    assert not found.fault.work, "it must count as the same failure"
    assert certain(judged(there(0, LOCKED), there(1, WAITS), history=(replace(past, step=3),))) == 0


def test_ranks_that_all_wait_in_one_collective_are_left_to_the_network_without_blame() -> None:
    found = judged(there(0, WAITS), there(1, WAITS))
    assert waits_on(found) == 60.0
    assert found is not None
    assert (found.rank, found.work) == (-1, "a collective")


def test_collectives_at_different_places_are_named_and_keep_their_limit() -> None:
    """One collective may be complete, and its rank further on, before another rank has its result."""
    evaluates = replace(WAITS, where="evaluate (train.py:42)")
    found = judged(there(0, WAITS), there(1, evaluates))
    assert waits_on(found) == 60.0
    assert found is not None
    assert found.why == (
        "all ranks wait for each other in collectives at different places:"
        " rank 0 in <module> (train.py:9), rank 1 in evaluate (train.py:42)"
    )


def test_a_single_rank_has_the_limits_of_possible_work() -> None:
    lone: dict[str, Any] = {"placement": ("m0",), "world_size": 1}
    for late_s in (50.0, 5000.0):
        found = judged(there(0, SLEEPS, late_s=late_s), **lone)
        assert found is not None
        assert (found.act_ns, found.fault) == (None, None)
        assert found.warn_ns is not None
    assert certain(judged(there(0, LOCKED), **lone)) == 0
    assert certain(judged(there(0, STOPPED), **lone)) == 0


SLEEPS_APART = replace(SLEEPS, meets_unseen=False)
COMPUTES_APART = replace(SPINS, calls=("run",), meets_unseen=False)
READS_APART = replace(PLAIN, calls=("file",), io_bytes=9, meets_unseen=False)
APART = [SLEEPS_APART, COMPUTES_APART, replace(COMPUTES_APART, moved=True), READS_APART]


@pytest.mark.parametrize("inspection", APART, ids=["sleeps", "computes", "works", "reads"])
def test_ranks_that_are_all_seen_to_wait_for_no_other_have_no_limit(inspection: RankInspection) -> None:
    for late_s in (50.0, 5000.0):
        now = seen(there(0, SLEEPS_APART, late_s=late_s), there(1, inspection, late_s=late_s))
        found = detection.judge(now, POLICY)
        assert found is not None
        assert (found.act_ns, found.fault, found.limit_s, found.place) == (None, None, None, verdict.APART)
        assert found.warn_ns == now.watch.since_ns + 60 * S
    assert found is not None
    assert sentences.warning(now, found) == (
        "rank 0 has been in evaluate (train.py:42) (sleeping) since step 5; no rank waits for"
        " another, so it is left alone: no step for 5000 s. --hang-floor TIME would restart it"
    )
    floor = replace(POLICY, hang_floor_s=1.0)
    assert certain(judged(there(0, inspection), there(1, inspection), policy=floor)) in (-1, 0)
    assert certain(judged(there(0, inspection), there(1, STOPPED))) == 1
    assert waits_on(judged(there(0, inspection), there(1, LOCKED))) >= 60.0, "a rank may be waiting for it"
    assert certain(judged(there(0, LOCKED), there(1, LOCKED))) == -1


OTHERS = {
    "in a collective": WAITS,
    "perhaps on a device, or through MPI": replace(COMPUTES_APART, meets_unseen=True),
    "by a launcher that does not say": SLEEPS,
    "in a lock, perhaps of a collective's result": replace(SLEEPS_APART, calls=("lock", "poll")),
    "a socket": replace(SLEEPS_APART, calls=("network",)),
    "a pipe": replace(SLEEPS_APART, calls=("poll",)),
    "a child": replace(SLEEPS_APART, calls=("child",), children=1),
    "a file that does not answer, or its lock": replace(READS_APART, io_bytes=0),
    "nobody can tell": replace(SLEEPS_APART, calls=()),
    "no stack": replace(SLEEPS_APART, stack="no stack: py-spy is not installed"),
    "in the backward pass": replace(
        COMPUTES_APART, stack=REDUCING.replace("all_reduce (torch/distributed/", "_engine_run_backward (x/")
    ),
}


@pytest.mark.parametrize("inspection", OTHERS.values(), ids=OTHERS)
def test_if_a_rank_may_wait_for_another_the_limit_applies(inspection: RankInspection) -> None:
    found = judged(there(0, SLEEPS_APART, late_s=50.0), there(1, inspection, late_s=50.0))
    assert waits_on(found) > 0.0
    assert certain(judged(there(0, SLEEPS_APART, late_s=700.0), there(1, inspection, late_s=700.0))) in (
        -1,
        0,
        1,
    )


def test_a_rank_never_seen_or_not_for_long_may_wait_for_another() -> None:
    unseen = judged(there(0, SLEEPS_APART, late_s=700.0), there(1, None, late_s=700.0))
    assert certain(unseen) in (-1, 0)
    before = seen(there(0, SLEEPS_APART), there(1, SLEEPS_APART))
    for after_s, alone in ((9, True), (11, False)):
        now = replace(before, now_ns=before.now_ns + after_s * S)
        now = replace(now, watch=observation.update(before.watch, now))
        found = detection.judge(now, POLICY)
        assert found is not None
        assert (found.act_ns is None) is alone


def test_time_in_which_no_rank_waited_for_another_counts_toward_no_limit() -> None:
    """One rank finishes its own part of an evaluation and enters the collective before the others."""
    late: dict[str, Any] = {"late_s": 1000.0}
    before = seen(there(0, SLEEPS_APART, **late), there(1, COMPUTES_APART, **late))
    now = seen(
        there(0, WAITS, turn=2, **late), there(1, SLEEPS, turn=2, **late), watch=before.watch, now_s=105.0
    )
    now = replace(now, watch=observation.update(before.watch, now))
    found = detection.judge(now, POLICY)
    assert found is not None
    assert found.act_ns == before.now_ns + stall_limits.BUSY_FACTOR * 60 * S
    assert found.warn_ns == before.now_ns + stall_limits.BUSY_FACTOR * 30 * S
    short = detection.judge(now, replace(POLICY, stall_limit_s=2.0))
    assert short is not None
    assert short.act_ns == before.now_ns + 10 * S, "it must wait for inspections that are seconds apart"


def test_a_rank_that_left_while_another_waits_for_it_is_named_with_how_it_left() -> None:
    left = there(1, None, stalled=False, ending=Ending(1, 0))
    found = judged(there(0, WAITS), left)
    assert certain(found) == 1
    assert found is not None
    assert found.fault is not None
    assert found.fault.detail == "rank 1 exited with code 0 in the middle of its loop, after step 5"
    busy = judged(there(0, SLEEPS), left)
    assert busy is not None
    assert busy.act_ns is None, "the rank works alone"


def test_the_users_minimum_applies_to_every_kind_of_work() -> None:
    policy = replace(POLICY, hang_floor_s=1.0)
    for inspection in (SLEEPS, replace(PLAIN, moved=True), replace(PLAIN, cpu_s=0.2), WAITS):
        found = judged(there(0, inspection), there(1, WAITS), policy=policy)
        assert certain(found) in (0, -1)
    lone: dict[str, Any] = {"placement": ("m0",), "world_size": 1}
    assert certain(judged(there(0, SLEEPS), policy=policy, **lone)) == 0


def test_before_all_ranks_were_inspected_nothing_is_done_for_a_while() -> None:
    found = judged(there(0, None), there(1, SLEEPS))
    assert found is not None
    assert found.act_ns is None
    late = judged(there(0, None, late_s=70.0), there(1, SLEEPS, late_s=70.0))
    assert certain(late) == -1, "one of them was never seen"


def test_a_phase_that_changes_between_two_inspections_is_a_sign_of_work() -> None:
    before = seen(there(0, SLEEPS), there(1, WAITS))
    later = replace(SLEEPS, phase_seq=3)
    now = seen(there(0, later, turn=2), there(1, WAITS, turn=2), watch=before.watch)
    assert now.watch.ranks[0].worked_ns == now.now_ns
    assert before.watch.ranks[0].worked_ns == 0


def test_time_in_which_the_supervisor_did_not_run_extends_the_limits() -> None:
    before = seen(there(0, SLEEPS), there(1, WAITS)).watch
    assert observation.discount_pause(before, 7 * S).since_ns == before.since_ns + 7 * S


def test_a_stall_that_ended_is_learned_for_its_kind_unless_it_was_short() -> None:
    before = seen(there(0, SLEEPS, late_s=30.0), there(1, WAITS, late_s=30.0)).watch
    over = seen(there(0, None, stalled=False), there(1, None, stalled=False), watch=before).watch
    assert over.passed == (LearnedStall("sleep", 30.0),)
    short = seen(there(0, SLEEPS), there(1, WAITS)).watch
    assert seen(there(0, None, stalled=False), there(1, None, stalled=False), watch=short).watch.passed == ()


def test_the_warning_names_the_rank_the_line_the_times_and_the_remedy() -> None:
    now = seen(there(0, SLEEPS, late_s=30.0), there(1, WAITS, late_s=30.0))
    found = detection.judge(now, POLICY)
    assert found is not None
    assert sentences.warning(now, found) == (
        "rank 0 has been in evaluate (train.py:42) (sleeping) since step 5: no step for 30 s while"
        " rank 1 waits; Holdfast restarts it at 60 s. If this is intended, use"
        ' `with state.pause("eval", limit_s=...)` or a larger --stall-limit'
    )


@pytest.mark.parametrize("told", [None, report("m2", None)], ids=["no report", "no launcher"])
def test_no_rank_hangs_if_it_may_wait_for_ranks_about_which_nothing_is_known_yet(
    told: MemberReport | None,
) -> None:
    """A supervisor has just taken over. The third rank may be in a pause or working."""
    waiting = [there(0, WAITS, late_s=300.0), there(1, WAITS, late_s=300.0)]
    three: dict[str, Any] = {"world_size": 3, "placement": ("m0", "m1", "m2")}
    for policy in (POLICY, replace(POLICY, hang_floor_s=1.0)):
        found = judged(*waiting, member("m2", told), policy=policy, **three)
        assert found is not None
        assert (found.fault, found.act_ns, found.warn_ns) == (None, None, None)
    assert certain(judged(*waiting, there(2, WAITS, late_s=300.0), since_ns=-300 * S, **three)) == -1


def test_a_member_that_never_reports_its_ranks_does_not_suppress_verdicts_indefinitely() -> None:
    """Its sidecar reports, but finds no launcher although there is one."""
    three: dict[str, Any] = {"world_size": 3, "placement": ("m0", "m1", "m2"), "since_ns": -300 * S}
    mute = report("m2", None)
    members = (there(0, WAITS), there(1, STOPPED))
    watch = seen(*members, member("m2", mute), **three).watch
    assert watch.untold_ns == 100 * S
    later = seen(*members, member("m2", mute), watch=watch, now_s=159.0, **three)
    found = detection.judge(later, POLICY)
    assert found is not None
    assert found.act_ns is None
    after = seen(*members, member("m2", mute), watch=later.watch, now_s=161.0, **three)
    found = detection.judge(after, POLICY)
    assert found is not None
    assert found.act_ns is not None
    assert found.rank == 1
    told = seen(*members, member("m2", report("m2", launcher(rank(2)))), watch=later.watch, **three)
    assert told.watch.untold_ns == 0
    assert observation.discount_pause(later.watch, 5 * S).untold_ns == 105 * S
    deaf = member("m2", replace(mute, launcher_silent="its launcher has sent no heartbeat for 5 s"))
    assert certain(judged(*members, deaf, **three)) == 1


def test_a_supervisor_that_takes_over_compares_two_inspections_before_it_calls_work_a_hang() -> None:
    """Its predecessor may have seen the rank working all the time."""

    def at(looked: RankInspection, watch: StallWatch | None = None, turn: int = 1) -> View:
        waiting = there(0, WAITS, late_s=300.0, turn=turn)
        return seen(waiting, there(1, looked, late_s=300.0, turn=turn), watch=watch, since_ns=99 * S)

    first = at(SLEEPS)
    found = detection.judge(first, POLICY)
    assert found is not None
    assert found.act_ns == 99 * S + int((stall_limits.TWICE_S + POLICY.look_s) * S)
    assert certain(detection.judge(at(SLEEPS, first.watch, turn=2), POLICY)) == 1
    moved = at(replace(SLEEPS, phase_seq=3), first.watch, turn=2)
    assert waits_on(detection.judge(moved, POLICY)) == 300.0 + POLICY.stall_limit_s
    late = replace(first, memory=replace(first.memory, since_ns=50 * S))
    assert certain(detection.judge(late, POLICY)) == 1, "a missing inspection must not be waited for"
