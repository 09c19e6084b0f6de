"""A leader whose host does not answer is replaced before its lease expires, and no other leader is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from supervisor.kubernetes.lease import SOLE, EarlyTakeover, LeaseTerms
from tests.unit.supervisor.kubernetes.leaders.silent_hosts import (
    EARLY,
    OLD_TERMS,
    TERMS,
    Pair,
    Supervisor,
)
from tests.unit.supervisor.kubernetes.object_store import LOST_REQUEST
from tests.unit.supervisor.kubernetes.simulated_time import simulated

# The last renewal may have been seen just before the cut, or one read of the lease after it.
LATEST_S = EARLY.silent_s + EARLY.poll_s + 0.1
WHOLE_S = TERMS.duration_s - TERMS.retry_s  # the lease never expires sooner after a cut
PHASES_S = [number / 10 for number in range(10)]


def lease(pair: Pair) -> dict[str, Any]:
    return pair.store.objects["leases", "ns", "leader"]


def renewal(pair: Pair) -> str:
    spec = lease(pair)["spec"]
    return f"{spec.get('holderIdentity')} {spec['renewTime']}"


def permission(pair: Pair) -> str:
    return str((lease(pair)["metadata"].get("annotations") or {}).get(SOLE, ""))


# -- the terms


@pytest.mark.parametrize(
    "wrong",
    [
        {"sole_s": 0.0},
        {"sole_s": 3.0},  # no longer than another process waits
        {"sole_s": 3.5},
        {"suspect_s": 1.7},  # too late for two probes
        {"probes": 3},
    ],
)
def test_terms_of_an_early_takeover_that_are_not_safe_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="early takeover"):
        EarlyTakeover(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry_s": 1.25},  # no second attempt before `sole_s` ends
        {"duration_s": 3, "deadline_s": 2.8},
        {"deadline_s": 2.4},  # less than `sole_s`
    ],
)
def test_terms_that_do_not_fit_an_early_takeover_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="early takeover"):
        LeaseTerms(early=EARLY, **wrong)


def test_a_leader_stops_before_another_process_takes_over_early() -> None:
    """Requests that it has sent have half a second to arrive."""
    assert EARLY.silent_s - EARLY.sole_s >= 0.5
    assert TERMS.duration_s - TERMS.deadline_s >= 0.5


# -- a leader's node is cut off


@pytest.mark.parametrize("cut_s", PHASES_S)
@pytest.mark.parametrize("phase_s", [0.05, 0.3])
def test_a_leader_that_is_cut_off_is_replaced_within_seconds(cut_s: float, phase_s: float) -> None:
    _replaced(cut_s, phase_s)


@simulated
async def _replaced(cut_s: float, phase_s: float) -> None:
    pair = Pair()
    await pair.begin(phase_s)
    await pair.passes(cut_s)
    pair.first.cut_off()
    took_s = await pair.until_second_leads(LATEST_S)
    assert took_s > EARLY.silent_s - TERMS.retry_s - 0.1, (
        "the last renewal was at most a second before the cut"
    )
    assert not pair.first.is_only_leader
    await pair.passes(0.1)
    assert not pair.second.probes.is_suspected
    assert pair.second.expected == [False, True], "a member that waits for it is never told otherwise"
    term = pair.second.term
    assert term is not None
    assert term.replaced is not None
    assert term.replaced.holder.startswith("s-1_")
    assert EARLY.probes * EARLY.probe_s <= term.silent_for_s < took_s
    pair.first.line.cut, pair.first.host_answers = False, True
    await pair.passes(10.0)
    assert pair.first.is_lost
    assert pair.second.is_only_leader


@simulated
async def test_a_leader_that_only_the_other_supervisor_does_not_reach_stays() -> None:
    """Otherwise, two supervisors that do not reach each other would depose each other forever."""
    pair = Pair()
    await pair.begin()
    pair.first.host_answers = False
    await pair.passes(300.0)
    assert pair.first.is_only_leader


@simulated
async def test_a_leader_that_only_does_not_reach_the_api_server_keeps_its_lease_until_it_expires() -> None:
    """It sends orders until then, and gives up everything that no epoch protects."""
    pair = Pair()
    await pair.begin()
    pair.first.line.cut = True
    await pair.passes(WHOLE_S)
    assert pair.second.term is None
    assert not pair.first.is_only_leader
    assert pair.first.term is not None
    assert pair.first.term.may_order
    await pair.until_second_leads(3.0)
    await pair.passes(5.0)
    assert pair.first.is_lost


@pytest.mark.parametrize("answers", [True, None])
@simulated
async def test_a_frozen_leader_keeps_its_lease_until_it_expires_and_does_nothing_when_it_wakes_up(
    answers: bool | None,
) -> None:
    """Its kernel answers, or its address was never found."""
    pair = Pair()
    await pair.begin()
    pair.first.line.is_frozen, pair.first.host_answers = True, answers
    await pair.passes(WHOLE_S)
    assert pair.second.term is None
    await pair.until_second_leads(3.0)
    pair.first.line.is_frozen = False
    await pair.passes(20.0)
    assert pair.first.is_lost
    assert pair.second.is_only_leader


@simulated
async def test_a_leader_of_an_earlier_version_keeps_its_lease_until_it_expires() -> None:
    """It considers itself the only leader for longer than another process would wait."""
    pair = Pair(first=OLD_TERMS)
    await pair.begin()
    pair.first.cut_off()
    await pair.passes(WHOLE_S)
    assert pair.second.term is None
    await pair.until_second_leads(3.0)


@simulated
async def test_a_supervisor_of_an_earlier_version_waits_until_the_lease_expires() -> None:
    pair = Pair(second=OLD_TERMS)
    await pair.begin()
    assert permission(pair) == f"2.5 {renewal(pair)}"
    pair.first.cut_off()
    await pair.passes(WHOLE_S)
    assert pair.second.term is None
    await pair.until_second_leads(3.0)


@simulated
async def test_a_permission_ends_with_its_leader_although_an_earlier_version_keeps_it_in_the_lease() -> None:
    """The leader of the earlier version considers itself the only leader for 5 s after each renewal."""
    pair = Pair(second=OLD_TERMS)
    await pair.begin()
    pair.first.cut_off()
    await pair.until_second_leads(TERMS.duration_s + 1.0)
    await pair.passes(5.0)
    assert permission(pair).startswith("2.5 s-1_"), "the earlier version has kept it"
    pair.first, pair.second = pair.second, Supervisor(pair, "s-3", TERMS)
    await pair.passes(10.0)
    assert pair.first.is_only_leader
    pair.first.cut_off()
    await pair.passes(WHOLE_S)
    assert pair.second.term is None
    await pair.until_second_leads(3.0)


@simulated
async def test_a_leader_that_ends_leaves_no_permission_in_the_lease() -> None:
    pair = Pair(second=OLD_TERMS)
    await pair.begin()
    assert permission(pair)
    pair.first.task.cancel()
    await pair.until_second_leads(2.0)
    assert permission(pair) == ""


@pytest.mark.parametrize("value", ["2.5 {renewal}", "2 {renewal}", "0.5 {renewal}", "02.50 {renewal}"])
@simulated
async def test_a_permission_for_the_last_renewal_counts(value: str) -> None:
    pair = await _cut_off_with(value)
    await pair.until_second_leads(LATEST_S)


@pytest.mark.parametrize(
    "value",
    [
        "2.5",
        "2.5 ",
        "",
        " {renewal}",
        "{renewal}",
        "2.5  {renewal}",
        "2.5 {renewal} ",
        "2.5 {renewal} 7",
        "2.5 s-9_0a1b2c3d {time}",
        "2.5 {holder} 2026-01-01T00:00:00.000000Z",
        "2.5 {time} {holder}",
        "2.5 {holder}",
        "2.5 None None",
        "2.6 {renewal}",  # the leader considers itself the only one for longer than this process expects
        "0 {renewal}",
        "-1 {renewal}",
        "nan {renewal}",
        "-inf {renewal}",
        "1e0 {renewal}",
        "1_0 {renewal}",
        "\uff12 {renewal}",  # a digit, but not of ASCII
        "0." + "0" * 200_000 + "1 {renewal}",
        2.5,
        None,
    ],
)
@simulated
async def test_nothing_else_counts_as_a_permission(value: object) -> None:
    pair = await _cut_off_with(value)
    await pair.passes(WHOLE_S)
    assert pair.second.term is None
    await pair.until_second_leads(3.0)


async def _cut_off_with(value: object) -> Pair:
    """Return a pair whose leader was cut off after someone had changed its permission."""
    pair = Pair()
    await pair.begin()
    await pair.passes(0.3)  # no renewal is under way
    pair.first.cut_off()
    holder, _, time = renewal(pair).partition(" ")
    if isinstance(value, str):
        value = value.format(renewal=renewal(pair), holder=holder, time=time)
    lease(pair)["metadata"]["annotations"] = {SOLE: value}
    return pair


# -- what the other supervisor expects


async def _suspected() -> Pair:
    pair = Pair()
    await pair.begin()
    pair.first.cut_off()
    await pair.passes(3.0, lambda: pair.second.probes.is_suspected)
    assert pair.second.expected == [False, True]
    return pair


@simulated
async def test_a_suspicion_ends_when_the_host_of_the_leader_answers() -> None:
    pair = await _suspected()
    pair.first.line.cut, pair.first.host_answers = False, True
    await pair.passes(EARLY.probe_s + 0.1)
    assert pair.second.expected == [False, True, False]
    await pair.passes(10.0)
    assert pair.second.expected == [False, True, False]
    assert pair.first.is_only_leader


@simulated
async def test_nobody_expects_to_lead_while_the_lease_cannot_be_read() -> None:
    """The probes go on meanwhile, so one lost request does not delay a takeover."""
    pair = await _suspected()
    pair.store.faults = [LOST_REQUEST] * 100
    await pair.passes(EARLY.poll_s + 0.1)
    assert pair.second.expected == [False, True, False]
    pair.store.faults = ()
    await pair.until_second_leads(EARLY.silent_s - EARLY.suspect_s)
    assert pair.second.expected == [False, True, False, True]


# -- a slow API server


@pytest.mark.parametrize("latency_s", [0.3, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("answers", [True, False])
def test_a_slow_api_server_changes_no_leader(latency_s: float, answers: bool) -> None:
    _slow(latency_s, answers)


@simulated
async def _slow(latency_s: float, answers: bool) -> None:
    pair = Pair()
    await pair.begin()
    pair.first.line.latency_s = pair.second.line.latency_s = latency_s
    pair.first.host_answers = answers
    await pair.passes(120.0)
    assert pair.first.is_only_leader or latency_s > EARLY.quick_s
    assert pair.second.term is None
    assert bool(permission(pair)) is (latency_s <= EARLY.quick_s)
    pair.first.line.latency_s = pair.second.line.latency_s = 0.004
    await pair.passes(10.0)
    assert pair.first.is_only_leader
    assert permission(pair)


@simulated
async def test_while_the_api_server_is_slow_the_leader_acts_as_before() -> None:
    """A request that takes a second must fit into the time for which this process is the only leader."""
    pair = Pair()
    await pair.begin()
    pair.first.line.latency_s = 1.0
    await pair.passes(10.0)
    lefts: list[float] = []
    for _ in range(100):
        await pair.passes(0.1)
        assert pair.first.term is not None
        lefts.append(pair.first.term.left_s)
    assert min(lefts) > 2.5


@pytest.mark.parametrize("answers", [True, False])
@simulated
async def test_an_outage_of_the_api_server_changes_no_leader(answers: bool) -> None:
    pair = Pair()
    await pair.begin()
    for duration_s in (2.0, 3.2, 4.5, 60.0):
        pair.first.host_answers = answers
        for each in (pair.first, pair.second):
            each.line.cut = True
        await pair.passes(duration_s)
        for each in (pair.first, pair.second):
            each.line.cut = False
        await pair.passes(20.0)
        assert pair.first.is_only_leader, duration_s
        assert pair.second.term is None


# -- everything together


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_cut_or_slow_at_most_one_process_is_the_only_leader(seed: int) -> None:
    _at_random(seed)


@simulated
async def _at_random(seed: int) -> None:
    chance = random.Random(seed)
    pair = Pair()
    await pair.begin(chance.random())
    for _ in range(60):
        one: Supervisor = chance.choice((pair.first, pair.second))
        what = chance.choice(("cut", "silent", "api", "slow", "freeze", "heal", "heal", "heal"))
        if what == "cut":
            one.cut_off()
        elif what == "silent":
            one.host_answers = chance.choice((False, None))
        elif what == "api":
            one.line.cut = True
        elif what == "slow":
            one.line.latency_s = chance.uniform(0.0, 3.0)
        elif what == "freeze":
            one.line.is_frozen = True
        else:
            one.line.cut = one.line.is_frozen = False
            one.line.latency_s, one.host_answers = 0.004, True
        await pair.passes(chance.expovariate(0.4))
        if one.is_lost:
            restarted = Supervisor(pair, one.name, TERMS)
            pair.first, pair.second = (
                (restarted, pair.second) if one is pair.first else (pair.first, restarted)
            )
