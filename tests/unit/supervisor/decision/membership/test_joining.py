"""Which members are on trial in a group that has grown, and when they may join it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending
from supervisor.decision import remedy, transition
from supervisor.decision.decide import decide
from supervisor.decision.membership import joining, placement
from supervisor.fault_kinds import FaultName
from supervisor.view.model import (
    Fault,
    GroupSize,
    MemberView,
    OpenIncident,
    Policy,
    Secure,
    Start,
    View,
    Wait,
)
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, rank, report, view

POLICY = Policy(members=3, min_members=2)
GROWN: dict[str, Any] = {
    "placement": ("m0", "m2", "m3"),
    "world_size": 3,
    "resizable": True,
    "generation": 3,
    "joined": ("m3",),
    "started_ns": 60 * S,
    "sizes": (GroupSize(2, 2, (0, 2), 50 * S), GroupSize(3, 3, (0, 1, -1), 60 * S)),
}


def trained(name: str, number: int) -> MemberView:
    """Return a member with the state of the smaller group, whose ranks have stopped."""
    privates = tuple((other, 2, 5) for other in (0, 1))
    return holding(name, ((2, 5),), privates if number < 2 else (), secured_for=3)


def stopped(*found: Fault, now_s: float = 61.0, others: tuple[MemberView, ...] = (), **given: Any) -> View:
    incident = OpenIncident(2, 3, 60 * S, 60 * S, 0.0, found)
    there = (trained("m0", 0), trained("m2", 1), trained("m3", 2), *others)
    memory = {**GROWN, "phase": "securing", "since_ns": 60 * S, "incident": incident, **given}
    return view(*there, now_s=now_s, **memory)


def of(name: str, kind: FaultName = "crash", number: int = 2) -> Fault:
    return fault(kind, number, member=name)


@pytest.mark.parametrize(
    "kind", ["crash", "exception", "exit", "hang", "nan", "member_lost", "restore", "bad_input"]
)
def test_a_joiner_that_fails_is_left_out_and_the_run_does_not_end(kind: FaultName) -> None:
    seen = stopped(of("m3", kind))
    assert joining.failed(seen, POLICY) == ("m3",)
    assert placement.choose_members(seen, POLICY) == ("m0", "m2")
    assert remedy.reason_to_stop(seen, POLICY, of("m3", kind)) is None


def test_the_group_starts_without_it_at_once_and_the_failure_is_not_counted() -> None:
    seen = stopped(of("m3"))
    action = decide(seen, POLICY)
    assert isinstance(action, Start)
    assert action.placement == ("m0", "m2")
    assert "with 2 of 3 members, without m3, which failed on joining" in action.why
    after = transition.after(seen, action, POLICY)
    assert (after.history, after.joined, after.dropped) == ((), (), ("m3",))
    assert joining.grows_at_ns(after) - after.started_ns == 2 * joining.HOLD_S * S, "one further loss"


def test_another_standby_does_not_take_its_place_at_once() -> None:
    ready = member("m4", report("m4", launcher()))
    seen = stopped(of("m3"), now_s=300.0, others=(ready,))
    assert placement.choose_members(seen, POLICY) == ("m0", "m2")


def test_all_joiners_are_left_out_if_only_broken_connections_are_known() -> None:
    victims = (of("m0", "victim", 0), of("m2", "victim", 1))
    assert joining.failed(stopped(*victims), POLICY) == ("m3",)
    assert joining.failed(stopped(replace(of("", "hang"), rank=-1)), POLICY) == ("m3",)
    silent = tuple(replace(each, silent_s=2.0) if each.name == "m0" else each for each in stopped().members)
    assert joining.failed(replace(stopped(*victims), members=silent), POLICY) == (), "m0 may be lost"


@pytest.mark.parametrize(
    "given",
    [{"settled": True}, {"resizable": False}, {"joined": ()}, {"joined": ("m2", "m3")}],
    ids=["it has completed a step", "the script cannot", "none joined", "too few would be left"],
)
def test_other_failures_are_treated_as_usual(given: dict[str, Any]) -> None:
    assert joining.failed(stopped(of("m3"), **given), POLICY) == ()
    assert joining.failed(stopped(of("m0", number=0)), POLICY) == ()


def test_a_member_that_replaces_a_joiner_is_on_trial_too() -> None:
    held = stopped().memory
    assert joining.joined_after(held, ("m0", "m2", "m4"), (0, 1, 2)) == ("m4",)
    assert joining.joined_after(held, ("m0", "m2", "m3", "m4"), (0, 1, 2, -1)) == ("m3", "m4")
    assert joining.joined_after(replace(held, placement=()), ("m0", "m2"), (0, 1)) == ()


def test_a_member_that_was_left_out_gets_no_ranks_before_the_time_is_over() -> None:
    given: dict[str, Any] = {"placement": ("m0", "m2"), "world_size": 2, "reduced_by": 1, "dropped": ("m3",)}
    given |= {"joined": (), "sizes": (*GROWN["sizes"], GroupSize(4, 2, (0, 1), 60 * S))}
    lost = replace(stopped(**given), members=(trained("m0", 0), trained("m3", 2)))
    assert placement.choose_members(lost, POLICY) == ("m0",), "it replaces no other member either"
    later = replace(lost, now_ns=joining.grows_at_ns(lost.memory))
    assert placement.choose_members(later, POLICY) == ("m0", "m3")
    gone = replace(
        lost,
        memory=replace(lost.memory, lost=("m2",), incident=stopped(of("m2", "member_lost")).memory.incident),
    )
    waits = decide(gone, POLICY)
    assert isinstance(waits, Wait)
    assert waits.until_ns <= joining.grows_at_ns(lost.memory)


@pytest.mark.parametrize("joined", [("m3",), ()])
def test_a_joiner_whose_script_cannot_start_is_left_out(joined: tuple[str, ...]) -> None:
    waiting = rank(2, generation=3, pid=0, state="starting")
    state = launcher(
        waiting, parked=(), generation=3, warm_ending=Ending(0, 1), warm_failures=3, warm_tries=3
    )
    running = [
        member(name, report(name, launcher(rank(n, generation=3), generation=3)))
        for n, name in enumerate(("m0", "m2"))
    ]
    seen = view(*running, member("m3", report("m3", state)), now_s=130.0, **{**GROWN, "joined": joined})
    worked = replace(seen, memory=replace(seen.memory, saved=4, since_ns=60 * S))
    action = decide(worked, POLICY)
    assert isinstance(action, Secure)
    assert bool(action.end) == (not joined)
    if joined:
        assert joining.failed(stopped(*action.faults), POLICY) == ("m3",)
        assert action.faults[0].detail == "on member m3, the script failed 3 times before it joined"


def test_a_group_that_cannot_record_the_change_waits_to_leave_a_joiner_out_and_does_not_end() -> None:
    seen = replace(stopped(of("m3"), now_s=60.0 + POLICY.form_s), unrecorded=True)
    waits = decide(seen, POLICY)
    assert isinstance(waits, Wait)
    assert waits.until_ns > seen.now_ns
    assert waits.why == "m3 failed on joining and will be left out as soon as this can be recorded"
    assert isinstance(decide(replace(seen, unrecorded=False), POLICY), Start)


def test_a_restart_does_not_let_a_member_join_before_the_time_is_over() -> None:
    given: dict[str, Any] = {"placement": ("m0", "m2"), "world_size": 2, "reduced_by": 1, "joined": ()}
    seen = stopped(of("m2", number=1), **{**given, "sizes": GROWN["sizes"][:1]})
    assert placement.choose_members(seen, POLICY) == ("m0", "m2")
    later = replace(seen, now_ns=joining.grows_at_ns(seen.memory))
    assert placement.choose_members(later, POLICY) == ("m0", "m2", "m3")
