"""When a member that is about to end is replaced, and until when it counts as existing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, RankProgress
from supervisor.decision import remedy, transition
from supervisor.decision.decide import decide
from supervisor.decision.membership import departures, placement
from supervisor.view.model import Departure, End, Fault, MemberView, OpenIncident, Policy, Secure, View, Wait
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, progress, rank, report, view

POLICY = Policy(members=2, max_restarts=0)
DRAIN = Departure("its node is drained")
SUSPECT = Departure("the node agent reports a fault", may_stay=True)
ENDING = Departure("its pod is being deleted", 130 * S, has_begun=True)


# Two members hold a snapshot of step 5 and the private states of both ranks.
HELD: dict[str, Any] = {
    "slots": (HeldSnapshot(1, 5, 8),),
    "privates": tuple(HeldPrivateState(number, 1, 5, True) for number in (0, 1)),
}


def active(number: int, step: int = 5, **given: Any) -> MemberView:
    name = f"m{number}"
    told = report(name, launcher(rank(number)), progress=(progress(number, step),), **HELD)
    return member(name, told, **given)


def standby(name: str = "m2", **given: Any) -> MemberView:
    return member(name, report(name, launcher()), **given)


def seen(*members: MemberView, **given: Any) -> View:
    return view(*members, **{"settled": True, **given})


def exists(found: View) -> dict[str, bool]:
    return {each.name: each.exists for each in departures.without_ended(found, POLICY).members}


# -- the placement


def test_a_member_that_is_about_to_end_gets_no_ranks() -> None:
    leaving = standby("m0", departure=DRAIN)
    assert placement.choose_members(seen(leaving, standby("m1"), placement=()), POLICY) == ("m1",)
    gone = seen(active(0), member("m1", exists=False), standby(departure=DRAIN))
    assert placement.choose_members(gone, POLICY) == ("m0",)


def test_a_standby_on_a_suspect_node_is_the_last_choice_but_a_choice() -> None:
    lost = seen(active(0), member("m1", exists=False), standby(departure=SUSPECT), standby("m3"))
    assert placement.choose_members(lost, POLICY) == ("m0", "m3")
    only = seen(active(0), member("m1", exists=False), standby(departure=SUSPECT))
    assert placement.choose_members(only, POLICY) == ("m0", "m2")
    suspect = (standby("m0", departure=SUSPECT), standby("m1"))
    assert placement.choose_members(seen(*suspect, placement=()), POLICY) == ("m1", "m0")


def test_no_member_that_could_stay_moves_to_a_suspect_node() -> None:
    now = seen(active(0), active(1, departure=SUSPECT), standby(departure=SUSPECT))
    assert placement.choose_members(now, POLICY) == ("m0", "m1")
    assert placement.departing_members(now, POLICY) == ()
    both = seen(
        active(0, departure=SUSPECT), member("m1", exists=False), standby(departure=SUSPECT), standby("m3")
    )
    assert placement.choose_members(both, POLICY) == ("m0", "m3"), "the good one is for the lost member"


def test_a_member_that_is_about_to_end_keeps_its_ranks_without_a_standby() -> None:
    now = seen(active(0), active(1, departure=DRAIN))
    assert placement.choose_members(now, POLICY) == ("m0", "m1")
    assert placement.departing_members(now, POLICY) == ()


def test_a_lost_member_is_replaced_before_one_that_is_about_to_end() -> None:
    now = seen(active(0, departure=DRAIN), member("m1", exists=False), standby())
    assert placement.choose_members(now, POLICY) == ("m0", "m2")
    more = seen(active(0, departure=DRAIN), member("m1", exists=False), standby(), standby("m3"))
    assert placement.choose_members(more, POLICY) == ("m2", "m3")


@pytest.mark.parametrize(
    ("ends", "places"), [((0, 9), ("m0", "m2")), ((9, 0), ("m2", "m1")), ((8, 9), ("m2", "m1"))]
)
def test_the_member_that_ends_first_moves_first(ends: tuple[int, int], places: tuple[str, str]) -> None:
    """0: it is not known when the member ends."""
    first, second = (replace(DRAIN, ends_ns=at_s * S) for at_s in ends)
    now = seen(active(0, departure=first), active(1, departure=second), standby())
    assert placement.choose_members(now, POLICY) == places


# -- when the swap is due


def due(*members: MemberView, **given: Any) -> tuple[Fault, ...]:
    return departures.due(seen(*members, **given), POLICY)


def test_a_departure_stops_the_group_if_a_standby_is_ready() -> None:
    now = seen(active(0), active(1, departure=DRAIN), standby())
    action = decide(now, POLICY)
    assert isinstance(action, Secure)
    [found] = action.faults
    assert (found.kind, found.member, found.rank, found.step, found.at_ns) == (
        "departure",
        "m1",
        1,
        5,
        100 * S,
    )
    assert found.detail == "member m1 with rank 1 is about to end: its node is drained"


def test_a_departure_without_a_ready_standby_changes_nothing() -> None:
    for others in ((), (standby(departure=DRAIN),), (standby(silent_s=9.0),)):
        assert due(active(0), active(1, departure=DRAIN), *others) == ()


def test_a_group_that_has_just_started_is_not_interrupted() -> None:
    assert due(active(0), active(1, departure=DRAIN), standby(), settled=False) == ()


def without_state(number: int, *, joins: bool) -> MemberView:
    """Return a member that holds no snapshot; its script may keep its own state."""
    told = report(f"m{number}", launcher(rank(number), joins=joins), progress=(progress(number, 5, -1),))
    return member(f"m{number}", told)


@pytest.mark.parametrize(("joins", "count"), [(True, 0), (False, 1)])
def test_a_group_that_could_not_resume_is_not_stopped(joins: bool, count: int) -> None:
    first, second = (without_state(number, joins=joins) for number in (0, 1))
    third = member("m2", report("m2", launcher(joins=joins)))
    assert len(due(first, replace(second, departure=DRAIN), third)) == count


def evaluating(tail_s: float) -> MemberView:
    at: RankProgress = replace(progress(0, 5), tail_s=tail_s, tail_usual_s=0.001)
    return member("m0", report("m0", launcher(rank(0)), progress=(at,), **HELD))


def test_a_swap_waits_for_work_outside_of_a_step_until_the_member_ends_soon() -> None:
    soon, later = (replace(ENDING, ends_ns=int((100 + left_s) * S)) for left_s in (11.0, 13.0))
    for departure, count in ((DRAIN, 0), (later, 0), (soon, 1)):
        members = (evaluating(3.0), active(1, departure=departure), standby())
        assert len(due(*members)) == count, departure
    assert len(due(evaluating(0.001), active(1, departure=DRAIN), standby())) == 1


def test_a_stop_comes_before_a_swap() -> None:
    now = seen(active(0), active(1, departure=DRAIN), standby(), stop="graceful")
    action = decide(now, POLICY)
    assert isinstance(action, Secure)
    assert action.faults == ()


# -- what a departure costs


def test_a_departure_neither_counts_as_a_restart_nor_ends_a_run() -> None:
    cause = fault("departure", 1)
    assert remedy.reason_to_stop(seen(active(0), active(1)), POLICY, cause) is None
    ended = remedy.reason_to_stop(seen(active(0), active(1)), POLICY, fault("member_lost", 1))
    assert isinstance(ended, End)


def test_a_departure_is_not_remembered_as_a_failure() -> None:
    opened = OpenIncident(1, 1, 0, 0, 0.0, (fault("departure", 1),), reached=5)
    slots, privates = ((1, 5),), ((0, 1, 5), (1, 1, 5))
    first, second = (holding(name, slots, privates, secured_for=1) for name in ("m0", "m1"))
    second = replace(second, departure=DRAIN)
    now = seen(first, second, standby(), phase="securing", incident=opened)
    action = decide(now, POLICY)
    after = transition.after(now, action, POLICY)
    assert (after.placement, after.history) == (("m0", "m2"), ())
    assert after.incident is not None
    assert (after.incident.remedy, after.incident.lost) == ("swap", 0)


def test_a_crash_explains_the_stop_better_than_a_departure_and_a_victim_does_not() -> None:
    from supervisor.view import faults

    planned = fault("departure", 1)
    assert faults.root_cause((planned, fault("crash", 0))).kind == "crash"
    assert faults.root_cause((planned, fault("victim", 0))).kind == "departure"


# -- until when a member that has been asked to end exists


def test_a_member_whose_end_has_begun_exists_as_long_as_a_standby_can_replace_it() -> None:
    for phase in ("running", "securing"):
        now = seen(active(0), active(1, departure=ENDING), standby(), phase=phase)
        assert exists(now)["m1"]
    for phase in ("running", "saving", "stopping"):
        assert not exists(seen(active(0), active(1, departure=ENDING), phase=phase))["m1"]


def test_a_departure_that_has_not_begun_never_makes_a_member_lost() -> None:
    for phase in ("forming", "running", "securing", "saving", "stopping"):
        now = seen(active(0), active(1, departure=DRAIN), phase=phase)
        assert departures.without_ended(now, POLICY) is now


def test_a_member_whose_ranks_have_moved_exists_until_the_first_new_step() -> None:
    moved = {"placement": ("m0", "m2")}
    members = (active(0), standby("m1", departure=ENDING), active(2))
    assert exists(seen(*members, settled=False, **moved))["m1"]
    assert exists(seen(*members, phase="securing", **moved))["m1"]
    assert not exists(seen(*members, **moved))["m1"]


def test_a_member_that_alone_holds_the_newest_state_exists_while_the_group_has_stopped() -> None:
    privates = ((0, 1, 9), (1, 1, 9))
    newest = replace(holding("m1", ((1, 9),), privates, secured_for=1), departure=ENDING)
    assert exists(seen(active(0), newest, phase="securing"))["m1"]
    both = holding("m0", ((1, 9),), privates)
    assert not exists(seen(both, newest, phase="securing"))["m1"]
    unsecured = replace(holding("m1", (), ()), departure=ENDING)
    assert exists(seen(both, unsecured, phase="securing"))["m1"], "it has not reported its state yet"
    assert not exists(seen(both, replace(unsecured, silent_s=9.0), phase="securing"))["m1"]


@pytest.mark.parametrize(("silent_s", "kept"), [(1.0, True), (departures.HEARD_S, False)])
def test_after_a_takeover_a_standby_has_time_to_report(silent_s: float, kept: bool) -> None:
    unheard = member("m2", silent_s=silent_s)
    now = seen(active(0), active(1, departure=ENDING), unheard)
    assert exists(now)["m1"] is kept


def test_a_pod_that_never_connects_to_a_new_leader_is_not_waited_for_longer_than_others() -> None:
    """On a cluster, its silence counts only after 30 s."""
    late = member("m2", silent_s=departures.HEARD_S - 30.0, awaited_s=departures.HEARD_S)
    now = seen(active(0), active(1, departure=DRAIN), late)
    assert departures.unheard(now) == ()
    assert departures.await_standbys(now, POLICY, fault("departure", 1)) is None


def test_after_a_takeover_a_swap_waits_for_the_standby() -> None:
    cause = fault("departure", 1)
    now = seen(active(0), active(1, departure=DRAIN), member("m2", silent_s=1.0))
    assert departures.await_standbys(now, POLICY, cause) == Wait(104 * S + 1, "waiting for the report of m2")
    assert departures.await_standbys(now, POLICY, fault("crash", 1)) is None
    heard = seen(active(0), active(1, departure=DRAIN), standby())
    assert departures.await_standbys(heard, POLICY, cause) is None
    withdrawn = seen(active(0), active(1), member("m2", silent_s=1.0))
    assert departures.await_standbys(withdrawn, POLICY, cause) is None
