from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.decision.membership import placement
from supervisor.view.model import MemberView, OpenIncident, PastFault, Policy
from tests.unit.supervisor.job_views import S, fault, launcher, member, rank, report, view

POLICY = Policy(members=2)


def warm(name: str, **given: Any) -> MemberView:
    return member(name, report(name, launcher()), **given)


def cold(name: str) -> MemberView:
    return member(name, report(name, launcher(parked=())))


def test_the_first_ready_members_form_the_group_whatever_their_order_of_arrival() -> None:
    seen = view(cold("m0"), warm("m1"), warm("m2"), placement=())
    assert placement.choose_members(seen, POLICY) == ("m1", "m2")


def test_with_fewer_members_than_asked_for_those_that_can_are_returned() -> None:
    assert placement.choose_members(view(warm("m0"), placement=()), POLICY) == ("m0",)
    assert placement.choose_members(view(warm("m0"), member("m1", exists=False)), POLICY) == ("m0",)


def test_ranks_stay_on_their_members_even_without_warm_processes() -> None:
    assert placement.choose_members(view(cold("m0"), cold("m1"), warm("m2")), POLICY) == ("m0", "m1")


@pytest.mark.parametrize(
    "away",
    [
        member("m0", report("m0", launcher()), exists=False),
        member("m0", report("m0", launcher()), connected=False),
        member("m0", report("m0", launcher()), silent_s=3.0),
        member("m0", report("m0", None)),
    ],
)
def test_a_standby_takes_the_place_of_a_missing_member(away: MemberView) -> None:
    assert placement.choose_members(view(away, cold("m1"), cold("m2"), warm("m3")), POLICY) == ("m3", "m1")


def test_each_standby_takes_one_place() -> None:
    gone = [member(name, exists=False) for name in ("m0", "m1")]
    assert placement.choose_members(view(*gone, warm("m2"), warm("m3")), POLICY) == ("m2", "m3")
    assert placement.choose_members(view(*gone, warm("m2")), POLICY) == ("m2",)


@pytest.mark.parametrize(("step", "expected"), [(5, ("m0", "m2")), (6, ("m0", "m1"))])
def test_a_member_that_crashes_twice_without_a_step_gained_is_replaced(
    step: int, expected: tuple[str, ...]
) -> None:
    cause = fault("crash", 1, step)
    before = PastFault("crash", 1, "m1", 5, cause.signature, 90 * S, 1)
    incident = OpenIncident(2, 1, 0, 0, 0.0, (cause,))
    seen = view(warm("m0"), warm("m1"), warm("m2"), history=(before,), incident=incident)
    assert placement.choose_members(seen, POLICY) == expected
    alone = view(warm("m0"), warm("m1"), history=(before,), incident=incident)
    assert placement.choose_members(alone, POLICY) == ("m0", "m1")


def well(name: str, **given: Any) -> MemberView:
    return member(name, report(name, launcher(rank(0))), **given)


CRASH = PastFault("crash", 1, "m1", 5, "exit 1", 0, 1)


@pytest.mark.parametrize(
    ("cause", "last", "fails"),
    [
        (fault("crash", 1, 5), CRASH, True),
        (fault("crash", 1, 4), CRASH, True),
        (fault("crash", 1, 6), CRASH, False),
        (fault("exception", 1, 5), CRASH, False),
        (fault("crash", 1, 5), replace(CRASH, kind="exception"), False),
        (fault("crash", 1, 5), replace(CRASH, member="m0"), False),
        (fault("crash", 0, 5), CRASH, False),
        (fault("crash", 1, 5), None, False),
        (None, CRASH, False),
    ],
)
def test_a_standby_takes_the_place_of_a_member_whose_ranks_keep_failing(
    cause: Any, last: PastFault | None, fails: bool
) -> None:
    opened = OpenIncident(1, 1, 90 * S, 91 * S, 0.0, (cause,) if cause else ())
    older = replace(CRASH, member="m0")
    given: dict[str, Any] = {"history": (older, last) if last else (), "incident": opened}
    standby = member("m2", report("m2", launcher(parked=(0,))))
    now = view(well("m0"), well("m1"), standby, **given)
    assert placement.choose_members(now, POLICY) == (("m0", "m2") if fails else ("m0", "m1"))
    assert placement.choose_members(view(well("m0"), well("m1"), **given), POLICY) == ("m0", "m1")


def test_the_first_members_are_the_first_that_are_ready() -> None:
    def ready(name: str, **given: Any) -> MemberView:
        return member(name, report(name, launcher(parked=(0,))), **given)

    there = (ready("a", silent_s=5.0), member("b"), ready("c"), ready("d"), ready("e"))
    assert placement.choose_members(view(*there, placement=()), POLICY) == ("c", "d")
    assert placement.choose_members(view(*there, placement=("c", "x", "a")), POLICY) == ("c", "d", "e")
    assert placement.choose_members(view(*there, placement=("x", "y", "z", "q")), POLICY) == ("c", "d", "e")
