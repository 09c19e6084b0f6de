"""The exact moments from which members report, obey, may return, or may take ranks, and no longer do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.view import members
from supervisor.view.model import MemberView, Policy
from tests.unit.supervisor.job_views import S, launcher, member, rank, report, view

POLICY = Policy(members=2, form_s=600.0, member_timeout_s=5.0)
DEAF = "its launcher has sent no heartbeat for 5 s"


def well(name: str, **given: Any) -> MemberView:
    return member(name, report(name, launcher(rank(0))), **given)


@pytest.mark.parametrize(
    ("given", "reporting", "controllable"),
    [
        ({"silent_s": 1.49}, True, True),
        ({"silent_s": 1.5}, False, False),
        ({"connected": False}, False, False),
        ({"exists": False}, False, False),
        ({"report": report("m0", launcher(), launcher_silent=DEAF)}, True, False),
    ],
)
def test_a_member_reports_and_can_be_controlled(
    given: dict[str, Any], reporting: bool, controllable: bool
) -> None:
    found = well("m0", **given)
    assert (members.is_reporting(found), members.is_controllable(found)) == (reporting, controllable)
    assert not members.lacks_launcher_report(found)
    without = replace(found, report=report("m0", None, launcher_silent=members.unresponsive_launcher(found)))
    assert members.lacks_launcher_report(without) is controllable
    assert not members.lacks_launcher_report(replace(found, report=None))


def test_a_sidecar_is_silent_after_its_time_and_is_renewed_once_a_minute() -> None:
    def silent(at_s: float, renewed_s: float | None = None, **given: Any) -> bool:
        renewed = {} if renewed_s is None else {"m0": int(renewed_s * S)}
        return members.silent_sidecars(view(well("m0", **given), now_s=at_s), renewed) == ("m0",)

    assert [silent(100.0, silent_s=each) for each in (2.5, 2.51)] == [False, True]
    assert [silent(at, 40.0, silent_s=9.0) for at in (100.0, 100.1)] == [False, True]
    assert not silent(100.0, silent_s=9.0, exists=False)
    assert not silent(100.0, silent_s=9.0, report=None)


@pytest.mark.parametrize(
    ("found", "left_s"),
    [
        (well("m0", silent_s=1.0), 4.0),
        (well("m0", silent_s=5.0), 0.0),
        (well("m0", silent_s=9.0), 0.0),
        (well("m0", exists=False), 0.0),
        (member("m0", silent_s=1.0), 4.0),  # it has ranks, according to the journal
        (member("m9", silent_s=1.0), 599.0),
        (well("m9", silent_s=1.0), 4.0),
    ],
)
def test_each_member_has_exactly_this_time_of_silence_left(found: MemberView, left_s: float) -> None:
    now = view(found)
    assert members.timeout_left_s(now, found, POLICY) == left_s
    assert members.is_lost(now, found, POLICY) is (left_s == 0.0)
    assert members.next_timeout_s(now, POLICY, 60.0) == (min(left_s, 60.0) or 60.0)


def test_the_next_member_is_lost_when_the_first_of_their_times_is_over() -> None:
    three = view(well("m0", silent_s=4.5), well("m1", silent_s=3.0), well("m2", exists=False))
    assert members.next_timeout_s(three, POLICY, 60.0) == 0.5
    assert members.next_timeout_s(three, POLICY, 0.25) == 0.25
    assert members.next_timeout_s(view(well("m0", silent_s=4.999)), POLICY, 60.0) == 0.01, (
        "the shortest wait is 0.01 s"
    )
    assert members.next_timeout_s(view(), POLICY, 60.0) == 60.0


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (launcher(parked=(0, 1)), True),
        (launcher(), False),
        (launcher(parked=()), False),
        (launcher(parked=(), strategy="cold"), True),
        (None, False),
    ],
)
def test_a_member_is_ready_when_a_process_waits_for_each_of_its_ranks(state: Any, ready: bool) -> None:
    found = member("m9", report("m9", state))
    assert members.is_ready(found, 2) is ready
    assert not members.is_ready(replace(found, silent_s=2.0), 2)
    assert not members.is_ready(member("m9"), 2)


def test_members_that_may_return_have_their_time_from_when_they_were_last_well() -> None:
    def deadlines(now: MemberView, **given: Any) -> dict[str, int]:
        return members.recoverable_members(view(now, **given), POLICY, 60.0)

    quiet = well("m1", silent_s=2.0, heard_ns=80 * S, well_ns=70 * S)
    assert deadlines(quiet, since_ns=75 * S) == {"m1": 140 * S}
    assert deadlines(replace(quiet, well_ns=95 * S), since_ns=75 * S) == {"m1": 155 * S}
    assert deadlines(quiet, since_ns=90 * S) == {"m1": 150 * S}
    assert deadlines(replace(quiet, silent_s=5.0)) == {}, "it is lost"
    assert deadlines(replace(quiet, silent_s=1.0)) == {}, "it is usable"
    assert deadlines(replace(quiet, name="m9")) == {}, "it has no ranks"
    assert deadlines(replace(quiet, report=report("m1", launcher(), launcher_silent=DEAF))) == {}
    assert deadlines(member("m1", report("m1", None))) == {"m1": 60 * S}


def test_a_placed_member_that_has_not_reported_is_unheard() -> None:
    there = (member("m0"), member("m1", silent_s=5.0), member("m9"), well("m2"))
    now = view(*there, placement=("m0", "m1", "m2"))
    assert members.unheard_members(now, POLICY) == ("m0",)
