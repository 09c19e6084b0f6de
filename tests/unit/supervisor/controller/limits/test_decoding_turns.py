"""A report waits no longer because other namespaces or jobs have more members, or send larger reports."""

from __future__ import annotations

import asyncio
import time

from supervisor.controller.limits.decoding_turns import (
    COUNTED_S,
    EXCESS_BURST_S,
    EXCESS_RATE,
    TURN_S,
    DecodingTurns,
    FairQueue,
    WaitingReport,
)
from supervisor.controller.limits.owner import ReportOwner

LIMIT_S = 20.0


def waiting(owner: ReportOwner, expected_s: float = 0.01) -> WaitingReport:
    return WaitingReport(owner, expected_s, lambda: None)


def turns(queue: FairQueue, count: int, now_s: float = 0.0) -> list[ReportOwner]:
    found = [queue.take(now_s) for _ in range(count)]
    return [each.owner for each in found if each is not None]


def test_a_namespace_with_many_members_does_not_delay_another() -> None:
    queue, crowd, one = FairQueue(), ReportOwner("crowd", "job"), ReportOwner("one", "job")
    for _ in range(100):
        queue.add(waiting(crowd))
    turns(queue, 50)
    queue.add(waiting(one))
    assert one in turns(queue, 2)


def test_the_jobs_of_a_namespace_have_equal_shares() -> None:
    queue = FairQueue()
    owners = [ReportOwner("n", "many")] * 60 + [ReportOwner("n", "few")] * 10
    for owner in owners:
        queue.add(waiting(owner))
    assert turns(queue, 20).count(ReportOwner("n", "few")) == 10


def test_a_namespace_of_many_jobs_has_no_larger_share() -> None:
    queue = FairQueue()
    for number in range(40):
        queue.add(waiting(ReportOwner("many", str(number))))
    for _ in range(10):
        queue.add(waiting(ReportOwner("few", "job")))
    assert turns(queue, 20).count(ReportOwner("few", "job")) == 10


def test_shares_are_of_time_and_not_of_reports() -> None:
    queue, slow, quick = FairQueue(), ReportOwner("slow", ""), ReportOwner("quick", "")
    for _ in range(40):
        queue.add(waiting(slow, 0.001))
        queue.add(waiting(quick, 0.001))
    order = []
    for _ in range(22):
        found = queue.take(0.0)
        assert found is not None
        order.append(found.owner)
        queue.charge(found.owner, 0.01 if found.owner == slow else 0.001, found.expected_s, 0.0)
    assert order.count(slow) <= 3


def test_a_namespace_without_reports_saves_no_time_for_later() -> None:
    queue, busy, idle = FairQueue(), ReportOwner("busy", ""), ReportOwner("idle", "")
    for _ in range(200):
        queue.add(waiting(busy))
    turns(queue, 100)
    for _ in range(50):
        queue.add(waiting(idle))
    assert 9 <= turns(queue, 20).count(idle) <= 11


def test_reports_of_connections_that_have_ended_take_no_turn() -> None:
    queue, owner = FairQueue(), ReportOwner("n", "j")
    gone, here = waiting(owner), waiting(owner)
    queue.add(gone)
    queue.add(here)
    gone.is_gone = True
    assert queue.take(0.0) is here
    assert queue.take(0.0) is None
    assert not queue


def test_reports_that_are_longer_than_a_turn_are_limited_in_their_namespace_only() -> None:
    queue, long, short = FairQueue(), ReportOwner("long", ""), ReportOwner("short", "")
    now_s, spent_s = 100.0, 0.0
    while now_s < 160.0:
        if not queue.wait_s("long", now_s):
            queue.add(waiting(long))
        found = queue.take(now_s)
        if found is not None:
            queue.charge(long, 0.3, found.expected_s, now_s)
            spent_s += 0.3 - TURN_S
            now_s += 0.3
        queue.add(waiting(short))
        assert turns(queue, 1, now_s) == [short]
        queue.charge(short, TURN_S, 0.01, now_s)
        now_s += TURN_S
    assert spent_s <= EXCESS_BURST_S + 60 * EXCESS_RATE + 0.3
    assert spent_s >= 60 * EXCESS_RATE
    queue.add(waiting(long))
    assert queue.soonest_s(now_s) == queue.wait_s("long", now_s)
    assert queue.wait_s("long", now_s + 60) == 0


async def test_a_report_is_decoded_within_two_reports_of_a_crowd() -> None:
    """30 members of one namespace report without a pause, and each report takes 10 ms."""
    shared, crowd, one = DecodingTurns(), ReportOwner("crowd", "job"), ReportOwner("one", "job")
    decoded: list[ReportOwner] = []

    async def member(owner: ReportOwner, reports: int) -> None:
        for _ in range(reports):
            expected_s = await shared.wait(owner, 200_000)
            began_s = time.perf_counter()
            while time.perf_counter() - began_s < 0.01:
                pass
            decoded.append(owner)
            shared.spend(owner, time.perf_counter() - began_s, expected_s)

    many = [asyncio.create_task(member(crowd, 4)) for _ in range(30)]
    while len(decoded) < 20:  # noqa: ASYNC110  the members are in this event loop
        await asyncio.sleep(0)
    before = len(decoded)
    await asyncio.wait_for(member(one, 5), LIMIT_S)
    between = decoded[before:]
    assert between.count(one) == 5
    assert between.count(crowd) <= 5 * (2 + TURN_S / 0.01)
    await asyncio.wait_for(asyncio.gather(*many), LIMIT_S)


async def test_a_namespace_that_waits_for_its_excess_delays_no_other_and_has_its_turn_later() -> None:
    shared, long, short = DecodingTurns(), ReportOwner("long", ""), ReportOwner("short", "")
    shared.spend(long, EXCESS_BURST_S + TURN_S + EXCESS_RATE * 0.3)
    waits = asyncio.create_task(shared.wait(long, 1))
    await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.wait_for(shared.wait(short, 1), LIMIT_S)
        shared.spend(short, 0.001)
    assert not waits.done()
    await asyncio.wait_for(waits, LIMIT_S)


async def test_a_cancelled_wait_leaves_the_turn_to_others() -> None:
    shared, owner = DecodingTurns(), ReportOwner("n", "j")
    shared.spend(owner, TURN_S)
    first, second = (asyncio.create_task(shared.wait(owner, 1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, LIMIT_S)


def test_time_of_earlier_iterations_takes_less_than_half_of_a_turn() -> None:
    async def decode() -> None:
        limits, owner = DecodingTurns(), ReportOwner("n", "job")
        for _ in range(100):
            spent_s = 0.0
            while spent_s < TURN_S - COUNTED_S:  # as many reports as arrive in one iteration of the loop
                assert await asyncio.wait_for(limits.wait(owner, 100), LIMIT_S) == 0.0, "it had to wait"
                limits.spend(owner, 0.0005)
                spent_s += 0.0005
            await asyncio.sleep(0)

    asyncio.run(decode())
