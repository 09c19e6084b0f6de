from __future__ import annotations

from typing import Any

import pytest

from supervisor.view import members
from supervisor.view.model import MemberView, OpenIncident, PastFault, Policy
from tests.unit.supervisor.job_views import S, fault, launcher, member, report, view

POLICY = Policy(members=2)


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


def test_the_first_ready_members_form_the_group_whatever_their_order_of_arrival() -> None:
    seen = view(cold("m0"), warm("m1"), warm("m2"), placement=())
    assert members.eligible_members(seen, POLICY) == ("m1", "m2")


def test_with_fewer_members_than_asked_for_those_that_can_are_returned() -> None:
    assert members.eligible_members(view(warm("m0"), placement=()), POLICY) == ("m0",)
    assert members.eligible_members(view(warm("m0"), member("m1", exists=False)), POLICY) == ("m0",)


def test_ranks_stay_on_their_members_even_without_warm_processes() -> None:
    assert members.eligible_members(view(cold("m0"), cold("m1"), warm("m2")), POLICY) == ("m0", "m1")


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
    assert members.eligible_members(view(away, cold("m1"), cold("m2"), warm("m3")), POLICY) == ("m3", "m1")


def test_each_standby_takes_one_place() -> None:
    gone = [member(name, exists=False) for name in ("m0", "m1")]
    assert members.eligible_members(view(*gone, warm("m2"), warm("m3")), POLICY) == ("m2", "m3")
    assert members.eligible_members(view(*gone, warm("m2")), POLICY) == ("m2",)


@pytest.mark.parametrize(("step", "expected"), [(5, ("m0", "m2")), (6, ("m0", "m1"))])
def test_a_member_that_crashes_twice_without_a_step_gained_is_replaced(
    step: int, expected: tuple[str, ...]
) -> None:
    cause = fault("crash", 1, step)
    before = PastFault("crash", 1, "m1", 5, cause.signature, 90 * S, 1)
    incident = OpenIncident(2, 1, 0, 0, 0.0, (cause,))
    seen = view(warm("m0"), warm("m1"), warm("m2"), history=(before,), incident=incident)
    assert members.eligible_members(seen, POLICY) == expected
    alone = view(warm("m0"), warm("m1"), history=(before,), incident=incident)
    assert members.eligible_members(alone, POLICY) == ("m0", "m1")


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
