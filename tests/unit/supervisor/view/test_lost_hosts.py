"""A member whose host has lost its power is lost within 5 s, and no member that lives ever is."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.member_messages import RankStall
from supervisor.decision.decide import decide
from supervisor.view import faults, members
from supervisor.view.model import Departure, JobPhase, MemberView, Policy, Secure, View, Wait
from tests.unit.supervisor.job_views import S, launcher, member, progress, rank, report, view

POLICY = Policy(members=2, member_timeout_s=30.0, members_created_externally=True)
NOW_S = 1000.0
LATE = RankStall(0, 1, 9, 4, 1, "backward", 2.0, 0.8)
GONE: dict[str, Any] = {"silent_s": 3.5, "unanswered_s": 2.0}  # what a power loss looks like


def here(number: int, stalls: tuple[RankStall, ...] = (LATE,), **given: Any) -> MemberView:
    """Return a member that trains; by default, its rank waits for others."""
    said = report(f"m{number}", launcher(rank(number)), progress=(progress(number, 9),), stalls=stalls)
    return member(f"m{number}", said, **{"stepped_ns": int((NOW_S - 3.2) * S), **given})


def of(*there: MemberView, phase: JobPhase = "running", settled: bool = True, **given: Any) -> View:
    names = tuple(each.name for each in there)
    given = {"placement": names, "world_size": len(names), **given}
    return view(*there, now_s=NOW_S, phase=phase, settled=settled, **given)


def is_lost(seen: View, name: str = "m1", policy: Policy = POLICY) -> bool:
    found = seen.member(name)
    assert found is not None
    return members.is_lost(seen, found, policy)


def test_a_host_that_answers_nothing_while_the_others_wait_for_its_ranks_is_lost() -> None:
    seen = of(here(0), here(1, **GONE))
    assert is_lost(seen)
    assert not is_lost(seen, "m0")
    action = decide(seen, POLICY)
    assert isinstance(action, Secure)
    assert action.why == (
        "member m1 with rank 1 is lost: it has stopped reporting, and its host has not answered for 2.0 s"
    )
    assert [(each.kind, each.member) for each in action.faults] == [("member_lost", "m1")]
    assert action.faults[0].at_ns == int((NOW_S - 3.5) * S)


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("silent_s", [3.0, 3.5, 29.9])
def test_a_lost_host_may_have_closed_its_connection_or_not(connected: bool, silent_s: float) -> None:
    assert is_lost(of(here(0), here(1, silent_s=silent_s, unanswered_s=2.0, connected=connected)))


ON_TIME: tuple[RankStall, ...] = ()
EARLIER = replace(LATE, generation=0)
LIVES: dict[str, View] = {
    "it reports": of(here(0), here(1, silent_s=0.4, unanswered_s=9.0)),
    "it reported 2.9 s ago": of(here(0), here(1, silent_s=2.9, unanswered_s=2.9)),
    "its host answers, so its sidecar is stopped": of(here(0), here(1, silent_s=29.9, unanswered_s=0.0)),
    "only one probe has failed": of(here(0), here(1, silent_s=29.9, unanswered_s=1.9)),
    "the others are on time": of(here(0, ON_TIME), here(1, silent_s=29.9, unanswered_s=29.0)),
    "the others were late in an earlier generation": of(here(0, (EARLIER,)), here(1, **GONE)),
    "the others stepped 2.9 s ago": of(here(0, stepped_ns=int((NOW_S - 2.9) * S)), here(1, **GONE)),
    "it is the only member": of(here(1, **GONE)),
    "the others are silent too": of(here(0, silent_s=1.6), here(1, **GONE)),
    "the connections of the others have ended": of(here(0, connected=False), here(1, **GONE)),
    "two of three are silent": of(here(0), here(1, **GONE), here(2, **GONE)),
    "it has no ranks": of(here(0), here(1, **GONE), placement=("m0",)),
}


@pytest.mark.parametrize("seen", LIVES.values(), ids=LIVES.keys())
def test_every_sign_of_life_saves_it(seen: View) -> None:
    assert not is_lost(seen)
    assert not any(each.member == "m1" for each in faults.find_faults(seen, POLICY))


def test_half_of_the_members_may_be_lost_together() -> None:
    """A rack without power. More than half would look like a supervisor that is out of reach."""
    seen = of(here(0), here(1, **GONE), here(2), here(3, **GONE))
    assert [is_lost(seen, f"m{number}") for number in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("phase", ["securing", "saving", "stopping"])
def test_outside_of_training_there_is_no_step_to_wait_for(phase: JobPhase) -> None:
    assert is_lost(of(here(0, ON_TIME), here(1, **GONE), phase=phase))


def test_a_group_that_has_not_completed_its_first_step_loses_nothing_by_a_restart() -> None:
    assert is_lost(of(here(0, ON_TIME), here(1, **GONE), settled=False))


def test_the_decision_is_due_as_soon_as_the_evidence_can_be_complete() -> None:
    seen = of(here(0), here(1, silent_s=2.0, unanswered_s=0.25))
    action = decide(seen, POLICY)
    assert isinstance(action, Wait)
    assert 0 < (action.until_ns - seen.now_ns) / S <= 1.75
    assert members.next_timeout_s(seen, POLICY, 60.0) == pytest.approx(1.75)


def test_the_users_shorter_timeout_is_not_prolonged() -> None:
    policy = replace(POLICY, member_timeout_s=1.0)
    assert is_lost(of(here(0), here(1, silent_s=2.0)), policy=policy)


# -- a new leader, to which a member never connected


@pytest.mark.parametrize(
    ("unanswered_s", "silent_s", "stalls", "lost"),
    [
        (3.0, -20.0, (LATE,), True),
        (2.9, -20.0, (LATE,), False),
        (0.0, -20.0, (LATE,), False),
        (9.0, -20.0, ON_TIME, False),
        (0.0, 29.9, (LATE,), False),
        (0.0, 30.0, (LATE,), True),
    ],
)
def test_a_member_whose_host_was_lost_with_the_previous_leader_is_not_waited_for(
    unanswered_s: float, silent_s: float, stalls: tuple[RankStall, ...], lost: bool
) -> None:
    """The silence of a member counts only when all have had time to connect, and is negative before."""
    away = member("m1", None, silent_s=silent_s, unanswered_s=unanswered_s)
    seen = of(here(0, stalls, stepped_ns=0), away)
    assert is_lost(seen) is lost
    assert (members.unheard_members(seen, POLICY) == ()) is lost


# -- a member that only the supervisor does not reach


@pytest.mark.parametrize(
    ("silent_s", "stepped_s", "lost"),
    [
        (29.9, 0.5, False),
        (60.0, 0.5, False),
        (60.0, 29.9, False),
        (60.0, 30.1, True),
        (30.1, 60.0, True),  # the steps are older than the silence
        (299.0, 0.5, False),
        (300.1, 0.5, True),  # ranks that do not wait for each other hide a lost member for a while only
    ],
)
@pytest.mark.parametrize("unanswered_s", [0.0, 20.0])
def test_while_the_group_completes_steps_it_needs_all_members(
    silent_s: float, stepped_s: float, lost: bool, unanswered_s: float
) -> None:
    others = here(0, ON_TIME, stepped_ns=int((NOW_S - stepped_s) * S))
    mute = here(1, silent_s=silent_s, unanswered_s=unanswered_s, stepped_ns=0)
    assert is_lost(of(others, mute)) is lost


def test_on_one_machine_silence_alone_decides() -> None:
    """The keeper's members have neither probes nor times of steps."""
    for silent_s, lost in ((4.9, False), (5.0, True)):
        there = of(here(0, stepped_ns=0), here(1, silent_s=silent_s, stepped_ns=0))
        assert is_lost(there, policy=Policy(members=2)) is lost


# -- at its real size


@pytest.mark.parametrize("lost", [1, 1000])
def test_two_thousand_members_are_judged_in_milliseconds(lost: int) -> None:
    there = [here(number, **(GONE if number < lost else {})) for number in range(2000)]
    seen = of(*there)
    began_s = time.perf_counter()
    found = [each.name for each in there if members.is_lost(seen, each, POLICY)]
    took_s = time.perf_counter() - began_s
    assert found == [f"m{number}" for number in range(lost)]
    assert took_s < 1.0, took_s  # it takes about 5 ms; without the index, it would take a minute


CLOSED: dict[str, Any] = {"connected": False, "silent_s": 3.0}


def waits(number: int = 2, **given: Any) -> MemberView:
    """Return a standby with a warm process."""
    said = report(f"m{number}", launcher(parked=(1,)), stalls=())
    return member(f"m{number}", said, **given)


def stopped(*there: MemberView, phase: JobPhase = "securing", **given: Any) -> View:
    """Return a group of two members that a fault has stopped, with further members."""
    given = {"placement": ("m0", "m1"), "world_size": 2, **given}
    return view(*there, now_s=NOW_S, phase=phase, settled=True, **given)


def test_a_standby_replaces_a_member_whose_connection_is_closed_once_the_group_has_stopped() -> None:
    assert is_lost(stopped(here(0), here(1, **CLOSED), waits()))


@pytest.mark.parametrize(
    "seen",
    [
        stopped(here(0), here(1, **{**CLOSED, "silent_s": 2.9}), waits()),
        stopped(here(0), here(1, **{**CLOSED, "connected": True}), waits()),
        stopped(here(0), here(1, **CLOSED)),
        stopped(here(0), here(1, **CLOSED), waits(connected=False)),
        stopped(here(0), here(1, **CLOSED), waits(silent_s=2.0)),
        stopped(here(0), here(1, **CLOSED), member("m2", report("m2", launcher(parked=())))),
        stopped(here(0), here(1, **CLOSED), waits(), phase="running"),
        stopped(here(0, silent_s=3.0), here(1, **CLOSED), waits(), placement=("m0", "m1", "m3")),
    ],
    ids=[
        "its sidecar may be back soon",
        "it is only silent",
        "there is no standby",
        "the standby has no connection",
        "the standby is silent",
        "the standby is not warm",
        "the group trains",
        "most members are silent",
    ],
)
def test_otherwise_a_closed_connection_gets_the_time_of_a_silent_one(seen: View) -> None:
    assert not is_lost(seen)


def test_on_one_machine_a_closed_connection_gets_the_time_of_a_silent_one() -> None:
    local = replace(POLICY, members_created_externally=False)
    assert not is_lost(stopped(here(0), here(1, **CLOSED), waits()), policy=local)


def after_takeover(awaited_s: float, others_took_s: float, *there: MemberView, **given: Any) -> View:
    """Return a stopped group whose member m1 has not reported to its new leader, as m0 has."""
    first_ns = int((NOW_S - awaited_s + others_took_s) * S)
    away = member("m1", None, silent_s=awaited_s - 30.0, awaited_s=awaited_s)
    return stopped(here(0, heard_ns=first_ns), away, *(there or (waits(),)), **given)


@pytest.mark.parametrize(
    ("awaited_s", "others_took_s", "lost"),
    [
        (3.1, 0.1, True),
        (3.0, 0.1, False),
        (4.0, 1.0, True),
        (3.9, 1.0, False),
        (29.0, 10.0, False),  # a leader of thousands of members is slow
        (30.0, 10.0, True),
    ],
)
def test_a_standby_replaces_a_member_that_takes_far_longer_than_the_others_to_report_to_a_new_leader(
    awaited_s: float, others_took_s: float, lost: bool
) -> None:
    seen = after_takeover(awaited_s, others_took_s)
    assert is_lost(seen) is lost
    away = seen.member("m1")
    assert away is not None
    left_s = members.timeout_left_s(seen, away, POLICY)
    assert is_lost(after_takeover(awaited_s + left_s, others_took_s)), "the next decision is due in time"
    assert members.unheard_members(seen, POLICY) == (() if lost else ("m1",))
    if lost:
        found = faults.first_silent_member(seen)
        assert found is not None
        why = f"it has not reported to the new supervisor within {awaited_s:.1f} s"
        assert found.detail == f"member m1 with rank 1 is lost: {why}"
        assert found.at_ns == int((NOW_S - awaited_s) * S)


def late_for(number: int, awaited_s: float = 29.0) -> MemberView:
    """Return a member that has not reported to a new leader."""
    return member(f"m{number}", None, silent_s=awaited_s - 30.0, awaited_s=awaited_s)


LEAVES = Departure("its pod is being deleted", has_begun=True)
UNCONTROLLED: dict[str, Any] = {
    "report": replace(here(3).report or report("m3", None), launcher_silent="it hangs")
}
TWO_AWAY: dict[str, Any] = {"placement": ("m0", "m1", "m3", "m4"), "world_size": 4}


@pytest.mark.parametrize(
    "seen",
    [
        after_takeover(29.0, 0.1, phase="running"),
        after_takeover(29.0, 0.1, waits(connected=False)),
        after_takeover(29.0, 0.1, waits(departure=LEAVES)),
        after_takeover(29.0, 0.1, waits(), placement=("m0", "m1", "m3")),
        after_takeover(29.0, 0.1, waits(), here(3), late_for(4), **TWO_AWAY),
        after_takeover(29.0, 0.1, waits(), here(3), here(4, silent_s=1.6), **TWO_AWAY),
        after_takeover(8.0, 6.0, waits(), here(3, silent_s=1.6), waits(5), placement=("m0", "m1", "m3")),
        after_takeover(29.0, 0.1, waits(), here(3, departure=LEAVES), placement=("m0", "m1", "m3")),
        after_takeover(29.0, 0.1, waits(), here(3, **UNCONTROLLED), placement=("m0", "m1", "m3")),
        after_takeover(29.0, 0.1, dropped=("m2",)),
    ],
    ids=[
        "the group trains",
        "there is no standby",
        "the standby leaves",
        "most members have not reported",
        "another is late too, and one standby cannot replace both",
        "another may be away too",
        "the slowest of the others is silent",
        "another is about to end, and needs the standby",
        "the launcher of another does not respond, so it needs the standby",
        "the standby failed when it joined, and may not get ranks",
    ],
)
def test_otherwise_a_member_has_the_usual_time_to_report_to_a_new_leader(seen: View) -> None:
    assert not is_lost(seen)


def test_a_member_that_a_standby_replaces_early_is_still_waited_for_if_it_may_have_the_newest_state() -> None:
    for seen in (after_takeover(29.0, 0.1), stopped(here(0), here(1, **CLOSED), waits())):
        assert is_lost(seen)
        assert "m1" in members.recoverable_members(seen, POLICY, 30.0)
    gone = stopped(here(0), replace(here(1), exists=False), waits())
    assert not members.recoverable_members(gone, POLICY, 30.0)


def test_as_many_members_can_be_replaced_as_standbys_are_ready() -> None:
    seen = after_takeover(4.0, 0.1, waits(), waits(5), here(3), late_for(4, 4.0), **TWO_AWAY)
    assert [name for name in TWO_AWAY["placement"] if is_lost(seen, name)] == ["m1", "m4"]


def test_thousands_of_late_members_of_a_stopped_group_are_judged_in_milliseconds() -> None:
    names = tuple(f"m{number}" for number in range(4000))
    there = [here(number) if number % 2 else late_for(number) for number in range(4000)]
    seen = stopped(*there, *(waits(4000 + n, connected=False) for n in range(50)), placement=names)
    began_s = time.perf_counter()
    assert not any(members.is_lost(seen, each, POLICY) for each in there)
    took_s = time.perf_counter() - began_s
    assert took_s < 1.0, took_s  # it takes about 10 ms; looking for a standby each time takes seconds


def test_on_one_machine_a_member_has_the_usual_time_to_report_to_a_new_supervisor() -> None:
    local = replace(POLICY, members_created_externally=False)
    assert not is_lost(after_takeover(29.0, 0.1), policy=local)
