from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.member_messages import RankStall
from supervisor.decision import closing, resume_point, transition
from supervisor.decision.decide import decide
from supervisor.decision.membership import placement
from supervisor.hangs import observation
from supervisor.view import members
from supervisor.view.model import (
    Done,
    End,
    MemberView,
    OpenIncident,
    Policy,
    Replace,
    RunAction,
    Save,
    Secure,
    Start,
    View,
    Wait,
)
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, rank, report, view

POLICY = Policy(members=2, standby=1)
WHY = "its launcher has sent no heartbeat for 5 s and is stopped"
STATES = ((0, 1, 9), (1, 1, 9))  # private states of both ranks


def here(name: str, number: int, **given: Any) -> MemberView:
    """Return a member that trains, holds everything needed, and has reported it for generation 1."""
    held = holding(name, ((1, 9),), STATES, launcher=launcher(rank(number)), secured_for=1)
    assert held.report is not None
    return replace(held, report=replace(held.report, **given))


def deaf(found: MemberView) -> MemberView:
    assert found.report is not None
    return replace(found, report=replace(found.report, launcher_silent=WHY))


STANDBY = member("m2", report("m2", launcher(generation=0), secured_for=1))


def followed(seen: View, *kinds: type[RunAction]) -> list[RunAction]:
    """Decide and act once for each of `kinds`, with members that report nothing new."""
    actions: list[RunAction] = []
    for kind in kinds:
        actions.append(decide(seen, POLICY))
        assert isinstance(actions[-1], kind), actions[-1]
        seen = replace(seen, memory=transition.after(seen, actions[-1], POLICY))
    return actions


def test_a_member_that_reports_has_done_so_recently() -> None:
    assert members.is_reporting(member("m1", report("m1", None), silent_s=1.4))
    for away in ({"silent_s": 1.5}, {"connected": False}, {"exists": False}):
        assert not members.is_reporting(member("m1", report("m1", None), **away))


def test_a_member_that_reports_but_cannot_be_controlled_does_not_obey() -> None:
    found = here("m0", 0)
    assert (members.unresponsive_launcher(found), members.is_controllable(found)) == ("", True)
    assert (
        members.unresponsive_launcher(deaf(found)),
        members.is_reporting(deaf(found)),
        members.is_controllable(deaf(found)),
    ) == (
        WHY,
        True,
        False,
    )
    assert members.unresponsive_launcher(member("m0")) == ""


def test_a_new_member_may_be_silent_for_as_long_as_forming_takes() -> None:
    fresh = member("m7", silent_s=599.0)
    assert not members.is_lost(view(here("m0", 0)), fresh, POLICY)
    assert members.timeout_left_s(view(here("m0", 0)), fresh, POLICY) == 1.0


# -- what a deaf member leads to


def test_an_uncontrollable_members_place_is_taken_by_a_standby_and_its_processes_are_ended() -> None:
    seen = view(deaf(here("m0", 0)), here("m1", 1), STANDBY, settled=True)
    secure, start = followed(seen, Secure, Start)
    assert isinstance(secure, Secure)
    assert secure.just_in_time
    assert isinstance(start, Start)
    assert (start.placement, start.remedy) == (("m2", "m1"), "swap")
    assert WHY in start.why
    assert start.resume.step == 9
    assert start.resume.holders == ("m1",), "a member about to be ended must not be a holder"
    secured = replace(seen, memory=transition.after(seen, secure, POLICY))
    assert transition.after(secured, start, POLICY).lost == ("m0",)


def test_without_a_standby_another_member_is_created() -> None:
    seen = view(deaf(here("m0", 0)), here("m1", 1), settled=True)
    _, given_up = followed(seen, Secure, Replace)
    assert isinstance(given_up, Replace)
    assert given_up.member == "m0"


def test_an_uncontrollable_standby_is_replaced_and_never_chosen() -> None:
    seen = view(here("m0", 0), here("m1", 1), deaf(STANDBY), settled=True)
    action = decide(seen, POLICY)
    assert action == Replace("m2", f"member m2 is lost: {WHY}")
    assert not members.is_ready(deaf(STANDBY), 1)
    gone = view(member("m0", exists=False), here("m1", 1), deaf(STANDBY))
    assert placement.choose_members(gone, POLICY) == ("m1",)


def test_an_uncontrollable_member_is_not_expected_to_return() -> None:
    assert members.recoverable_members(view(deaf(here("m0", 0)), here("m1", 1)), POLICY, 60.0) == {}


def test_a_single_member_keeps_training_until_something_needs_its_launcher() -> None:
    alone = replace(POLICY, members=1, standby=0)
    lone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    quiet = view(deaf(here("m0", 0)), **lone)
    assert isinstance(decide(quiet, alone), Wait)
    stall = RankStall(0, 1, 9, 7, 2, "eval", 2.5, 1.0, limited=True)
    stuck = view(deaf(here("m0", 0, stalls=(stall,))), **lone)
    stuck = replace(stuck, watch=observation.update(stuck.watch, stuck))
    action = decide(stuck, alone)
    assert isinstance(action, Secure)
    after = replace(stuck, memory=transition.after(stuck, action, alone))
    assert decide(after, alone) == Replace("m0", "member m0 is lost and no standby is left")


@pytest.mark.parametrize("stop", ["", "graceful"])
def test_at_a_stop_the_state_of_an_uncontrollable_member_is_saved_by_that_member(stop: str) -> None:
    lone = view(deaf(here("m0", 0)), placement=("m0",), world_size=1, stop=stop)
    assert resume_point.newest(lone, None).source == ("slot" if stop else "none")
    action = closing.save_and_end(lone, ())
    assert isinstance(action, Save if stop else End)


def test_the_end_does_not_wait_for_an_uncontrollable_member() -> None:
    seen = view(deaf(here("m0", 0)), phase="stopping", since_ns=100 * S)
    assert isinstance(closing.stopping(seen, POLICY), Done)


def test_a_silent_sidecar_is_inspected_once_before_its_member_counts_as_lost() -> None:
    quiet = replace(here("m0", 0), silent_s=members.MUTE_S + 0.1)
    new = member("m2", silent_s=9.0)  # it has not reported yet, because it is still importing
    seen = view(quiet, here("m1", 1), new)
    assert members.silent_sidecars(seen, {}) == ("m0",)
    assert not members.is_lost(seen, quiet, POLICY)
    assert members.silent_sidecars(seen, {"m0": seen.now_ns - 1}) == ()
    long_ago_ns = seen.now_ns - int((members.RENEW_AGAIN_S + 1) * S)
    assert members.silent_sidecars(seen, {"m0": long_ago_ns}) == ("m0",)


SECURING: dict[str, Any] = {
    "phase": "securing",
    "settled": True,
    "since_ns": 100 * S,
    "incident": OpenIncident(
        1, 1, 90 * S, 91 * S, 0.0, (fault("exception", 0, message="RuntimeError: no", code=1),)
    ),
    "incidents": 1,
}


@pytest.mark.parametrize(("after_s", "known"), [(0.5, True), (5.5, True), (59.0, True), (61.0, False)])
def test_a_reporting_member_is_not_given_up_because_its_sidecar_cannot_reach_its_launcher(
    after_s: float, known: bool
) -> None:
    """It holds state that the group needs, and its launcher lives: a dead one takes its member with it."""
    members = (here("m0", 0), here("m1", 1, launcher=None))
    seen = view(*members, **SECURING, now_s=100 + after_s)
    action = decide(seen, replace(POLICY, standby=0, member_timeout_s=5.0))
    if known:
        assert isinstance(action, Wait)
        assert action.why == "waiting for the launcher of m1 to report to its sidecar"
        assert action.until_ns <= 160 * S
    else:
        assert action == Replace("m1", "member m1 is lost and no standby is left")


def test_a_member_whose_launcher_is_also_gone_or_silent_is_given_up() -> None:
    for lost in (
        replace(here("m1", 1, launcher=None), exists=False),
        replace(here("m1", 1, launcher=None), silent_s=9.0),
        deaf(here("m1", 1, launcher=None)),
    ):
        seen = view(here("m0", 0), lost, **SECURING, now_s=105.5)
        action = decide(seen, replace(POLICY, standby=0, member_timeout_s=5.0))
        assert action == Replace("m1", "member m1 is lost and no standby is left")


def test_a_standby_takes_the_place_of_a_member_whose_launcher_is_silent() -> None:
    seen = view(here("m0", 0), here("m1", 1, launcher=None), STANDBY, **SECURING)
    assert placement.choose_members(seen, POLICY) == ("m0", "m2")


def warm(name: str, **given: Any) -> MemberView:
    return member(name, report(name, launcher()), **given)


def cold(name: str) -> MemberView:
    return member(name, report(name, launcher(parked=())))


def test_a_member_is_ready_when_each_of_its_ranks_has_a_process_waiting() -> None:
    assert members.is_ready(warm("m0"), 1)
    assert not members.is_ready(warm("m0"), 2)
    assert not members.is_ready(cold("m0"), 1)
    assert members.is_ready(member("m0", report("m0", launcher(parked=(), strategy="cold"))), 4)
    assert not members.is_ready(member("m0", report("m0", None)), 1)


def test_missing_members_are_those_with_ranks_that_may_still_return() -> None:
    seen = view(warm("m0", connected=False), member("m1", exists=False), warm("m2", connected=False))
    assert members.recoverable_members(seen, POLICY, 60.0) == {"m0": 60 * S}


def test_each_missing_member_has_its_time_from_when_it_was_last_well() -> None:
    away = [warm("m0", connected=False, well_ns=99 * S, heard_ns=1), warm("m1", connected=False, heard_ns=S)]
    assert members.recoverable_members(view(*away), POLICY, 60.0) == {"m0": 159 * S, "m1": 61 * S}
    assert members.recoverable_members(view(*away, since_ns=98 * S), POLICY, 60.0) == {
        "m0": 159 * S,
        "m1": 158 * S,
    }


def test_the_next_silence_to_check_is_the_one_that_ends_first() -> None:
    seen = view(warm("m0", silent_s=1.0), warm("m1", silent_s=4.5), member("m2", exists=False))
    assert members.next_timeout_s(seen, POLICY, 60.0) == pytest.approx(0.5)
    assert members.next_timeout_s(view(), POLICY, 60.0) == 60.0
    late = view(warm("m0", silent_s=4.9999))
    assert members.next_timeout_s(late, POLICY, 60.0) == 0.01
