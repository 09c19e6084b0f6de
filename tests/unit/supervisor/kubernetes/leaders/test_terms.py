"""A process that was suspended does nothing before it knows its term. A successor waits only if it must."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from supervisor.kubernetes.client import PODS
from supervisor.kubernetes.errors import ServerUnreachable
from supervisor.kubernetes.leadership import Leadership, lead, sent_within
from supervisor.kubernetes.lease import HeldByAnother, LeaseLock, LeaseLost, LeaseStore, boot_s, pod_of
from tests.unit.supervisor.cluster.api_server import ServedObjects
from tests.unit.supervisor.kubernetes.object_store import LOST_REQUEST, Line, ObjectStore
from tests.unit.supervisor.kubernetes.simulated_time import now_s, simulated
from tests.unit.supervisor.kubernetes.test_lease import TERMS, Body, held_for


class Clock:
    """The clock of one process, which counts the time for which the process is suspended."""

    def __init__(self) -> None:
        self.suspended_s = 0.0

    def __call__(self) -> float:
        return now_s() + self.suspended_s


POD_UID = "0f1e2d3c-4b5a-4678-9abc-def012345678"


def lock(store: LeaseStore, identity: str, clock: Any = now_s, pod_uid: str = "") -> LeaseLock:
    return LeaseLock(store, "ns", "leader", identity, TERMS, clock=clock, pod_uid=pod_uid)


async def nobody(_epoch: int) -> str:
    return ""


@simulated
async def test_a_suspended_leader_may_do_nothing_until_its_term_is_renewed() -> None:
    """Not even in the first moment after it wakes up, before any other task has run."""
    store, clock = ObjectStore(), Clock()
    seen: list[tuple[bool, bool]] = []

    async def body(term: Leadership) -> None:
        def look() -> None:
            seen.append((term.may_order, term.left_s > 0))

        look()
        clock.suspended_s += 30
        look()
        await asyncio.sleep(TERMS.retry_s + 0.1)
        look()

    await lead(lock(store, "a", clock), body, nobody)
    assert seen == [(True, True), (False, False), (True, True)]


@simulated
async def test_a_suspended_leader_whose_lease_was_taken_never_acts_again() -> None:
    store, clock = ObjectStore(), Clock()
    seen: list[bool] = []

    async def body(term: Leadership) -> None:
        clock.suspended_s += 30
        store.change("leases", "ns", "leader", {"holderIdentity": "b_1", "leaseTransitions": 1})
        while True:
            seen.append(term.may_order or term.left_s > 0)
            await asyncio.sleep(0.01)

    with pytest.raises(LeaseLost, match="b_1 holds the lease"):
        await lead(lock(store, "a", clock), body, nobody)
    assert seen
    assert not any(seen)


@simulated
async def test_a_leader_that_wakes_up_cut_off_first_asks_for_a_rival() -> None:
    """Its orders continue only if there is none. What no epoch protects does not continue in either case."""
    for found in ("", "pod-2"):
        store, clock = ObjectStore(), Clock()
        line = Line(store)
        asked = asyncio.Event()
        before: list[bool] = []
        after: list[tuple[bool, bool]] = []

        async def rival(_epoch: int, found: str = found, asked: asyncio.Event = asked) -> str:
            await asyncio.sleep(0.5)  # the answer takes a while
            asked.set()
            return found

        async def body(
            term: Leadership,
            clock: Clock = clock,
            line: Line = line,
            asked: asyncio.Event = asked,
            before: list[bool] = before,
            after: list[tuple[bool, bool]] = after,
        ) -> None:
            clock.suspended_s += 30
            line.cut = True
            while not asked.is_set():
                before.append(term.may_order or term.left_s > 0)
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            after.append((term.may_order, term.left_s > 0))

        leading = lead(lock(line, "a", clock), body, rival)
        if found:
            with pytest.raises(LeaseLost, match="pod-2 leads"):
                await leading
        else:
            await leading
        assert before
        assert not any(before)
        assert after == ([] if found else [(True, False)])


@simulated
async def test_orders_continue_without_a_gap_while_the_api_server_is_away() -> None:
    store = ObjectStore()
    store.faults = [None, None, *[LOST_REQUEST] * 30]
    seen: set[bool] = set()

    async def rival(_epoch: int) -> str:
        await asyncio.sleep(2.0)  # no replica answers
        return ""

    async def body(term: Leadership) -> None:
        for _ in range(800):
            seen.add(term.may_order)
            await asyncio.sleep(0.1)

    await lead(lock(store, "a"), body, rival)
    assert seen == {True}


@simulated
async def test_a_lease_does_not_expire_while_nobody_can_watch_it() -> None:
    """After an outage or a suspension, all leases look old, but the leader may be about to renew its own."""
    store = ObjectStore()
    await lock(store, "a").try_hold()
    line = Line(store)
    other = lock(line, "b")
    await held_for(other, 10)
    line.cut = True
    for _ in range(30):
        with pytest.raises(ServerUnreachable):
            await other.try_hold()
        await asyncio.sleep(TERMS.retry_s)
    line.cut = False
    await held_for(other, TERMS.duration_s - 0.1)
    await asyncio.sleep(0.2)
    assert await other.try_hold() == 2


@simulated
async def test_two_locks_keep_their_leader_over_every_outage() -> None:
    store, body = ObjectStore(), Body(limit_s=600)
    lines = [Line(store), Line(store)]
    leading = asyncio.ensure_future(lead(lock(lines[0], "a"), body, nobody))
    await body.started.wait()
    successor = Body(limit_s=1)
    waiting = asyncio.ensure_future(lead(lock(lines[1], "b"), successor, nobody))
    for number in range(12):
        for line in lines:
            line.cut = True
        await asyncio.sleep(5 + 3 * number)
        for line in lines if number % 2 else reversed(lines):
            line.cut = False
            await asyncio.sleep(0)
        await asyncio.sleep(10)
    assert not successor.started.is_set()
    assert not body.cancelled
    leading.cancel()
    await asyncio.wait({leading})
    await waiting
    assert (body.epoch, successor.epoch) == (1, 2)


@simulated
async def test_a_successor_does_not_wait_for_a_process_that_has_ended() -> None:
    store, body = ObjectStore(), Body(limit_s=1)
    former = lock(store, "a")
    await former.try_hold()
    ended = asyncio.Event()
    asked: list[str] = []

    async def end_of(holder: str) -> str:
        asked.append(holder)
        await ended.wait()
        return "nothing listens there"

    following = asyncio.ensure_future(lead(lock(store, "b"), body, nobody, end_of))
    for _ in range(10):
        await asyncio.sleep(1)
        await former.try_hold()
    killed_s = now_s()
    ended.set()
    await following
    assert body.started_s - killed_s < 0.01
    assert body.epoch == 2
    assert asked == [former.holder], "one watch for each holder"


@simulated
async def test_the_end_of_one_process_says_nothing_about_the_next() -> None:
    """The container restarts and leads again before the other replica has acted on the end of the first."""
    store, body = ObjectStore(), Body(limit_s=1)
    first = lock(store, "a", pod_uid="u")
    await first.try_hold()
    other = lock(store, "b")
    with pytest.raises(HeldByAnother):
        await other.try_hold()
    second = lock(store, "a", pod_uid="u")
    await second.try_hold()
    other.note_ended(first.holder)
    with pytest.raises(HeldByAnother, match=second.holder):
        await other.try_hold()
    watched: list[str] = []

    async def end_of(holder: str) -> str:
        watched.append(holder)
        if len(watched) == 1:
            await asyncio.sleep(1e6)
        return "its pod has ended"

    following = asyncio.ensure_future(lead(other, body, nobody, end_of))
    await asyncio.sleep(1)
    third = lock(store, "a", pod_uid="u")
    await third.try_hold()
    await following
    assert watched == [second.holder, third.holder]
    assert body.epoch == 4


@simulated
async def test_no_request_is_awaited_beyond_the_term_but_a_renewed_term_is_used() -> None:
    until_s = [now_s() + 10.0]

    async def request(limit_s: float) -> str:
        await asyncio.sleep(limit_s)
        return "done"

    with pytest.raises(ServerUnreachable, match="the term as leader has ended"):
        await sent_within(lambda: until_s[0] - now_s(), request(1e6))
    assert now_s() == pytest.approx(until_s[0])
    with pytest.raises(ServerUnreachable):
        await sent_within(lambda: until_s[0] - now_s(), request(0.0))
    until_s[0] = now_s() + 10.0
    asyncio.get_running_loop().call_later(5.0, lambda: until_s.append(until_s.pop() + 60.0))
    assert await sent_within(lambda: until_s[0] - now_s(), request(50.0)) == "done"


async def test_a_request_is_not_written_if_the_term_ends_while_it_connects() -> None:
    """As when the process is frozen in the meantime: the check is the last step before the request."""
    left = [1e9]

    served = ServedObjects()
    async with served.serving() as server:
        connector: Any = server._session.connector
        connect = connector._create_connection

        async def connecting(*words: Any) -> Any:
            made = await connect(*words)
            left[0] = 0.0
            return made

        connector._create_connection = connecting
        with pytest.raises(ServerUnreachable, match="the term as leader has ended") as refused:
            await sent_within(lambda: left[0], server.delete(PODS, "w-0", "team", uid="u"))
        assert not refused.value.sent
        assert served.requests == []
        left[0] = 1e9
        await server.list(PODS)  # leaves a connection to be used again
        asked = len(served.requests)

        async def late() -> None:
            left[0] = -1.0
            await server.delete(PODS, "w-0", "team", uid="u")

        with pytest.raises(ServerUnreachable, match="the term as leader has ended"):
            await sent_within(lambda: left[0], late())
        assert len(served.requests) == asked
        await server.list(PODS)  # other requests are not concerned


def test_the_clock_of_terms_counts_suspended_time() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= boot_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize(
    ("holder", "pod"),
    [
        (f"pod-1_{POD_UID}-0123abcd", ("pod-1", POD_UID)),
        (f"_{POD_UID}-0123abcd", ("", "")),
        (f"pod-1_{POD_UID}", ("", "")),
        ("pod-1_0123abcd", ("", "")),
        ("pod-1_u-i-d-0123abcd", ("", "")),
        ("parked-by-ops", ("", "")),
        ("x", ("", "")),
    ],
)
def test_only_the_name_of_a_process_that_knows_its_pod_names_a_pod(holder: str, pod: tuple[str, str]) -> None:
    assert pod_of(holder) == pod


def test_the_holders_name_of_a_process_names_its_pod() -> None:
    assert pod_of(lock(ObjectStore(), "pod-1", pod_uid=POD_UID).holder) == ("pod-1", POD_UID)
    assert pod_of(lock(ObjectStore(), "pod-1").holder) == ("", "")
