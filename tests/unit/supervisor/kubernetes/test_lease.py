"""Leadership ends on time, and is never held twice; in simulated time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from supervisor.kubernetes.errors import Forbidden
from supervisor.kubernetes.leadership import REFUSED_S, Leadership, lead
from supervisor.kubernetes.lease import (
    MAX_EPOCH,
    HeldByAnother,
    LeaseLock,
    LeaseLost,
    LeaseStore,
    LeaseTerms,
)
from tests.unit.supervisor.kubernetes.object_store import (
    HANG,
    HANG_AFTER,
    LOST_ANSWER,
    LOST_REQUEST,
    Line,
    ObjectStore,
)
from tests.unit.supervisor.kubernetes.simulated_time import now_s, simulated

TERMS = LeaseTerms(duration_s=15, deadline_s=10.0, retry_s=2.0)
DOWN = [LOST_REQUEST] * 1000


def lock(store: LeaseStore, identity: str = "a", terms: LeaseTerms = TERMS) -> LeaseLock:
    return LeaseLock(store, "ns", "leader", identity, terms, clock=now_s)


def spec(store: ObjectStore) -> dict[str, Any]:
    found: dict[str, Any] = store.objects["leases", "ns", "leader"]["spec"]
    return found


async def held_for(other: LeaseLock, limit_s: float) -> None:
    """Watch the lease for `limit_s`, and assert that another process holds it throughout."""
    until_s = now_s() + limit_s
    while now_s() < until_s:
        with pytest.raises(HeldByAnother):
            await other.try_hold()
        await asyncio.sleep(min(TERMS.retry_s, until_s - now_s()))


class Body:
    """A body that leads for `limit_s` and takes `unwind_s` to end."""

    def __init__(self, limit_s: float = 1e5, unwind_s: float = 0.0) -> None:
        self.limit_s, self.unwind_s = limit_s, unwind_s
        self.started_s = self.ended_s = -1.0
        self.epoch = 0
        self.cancelled = 0
        self.started = asyncio.Event()

    async def __call__(self, term: Leadership) -> None:
        self.started_s, self.epoch = now_s(), term.epoch
        self.started.set()
        try:
            await asyncio.sleep(self.limit_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            await asyncio.sleep(self.unwind_s)
            self.ended_s = now_s()


@simulated
async def test_the_first_leader_has_epoch_1_and_releases_the_lease() -> None:
    store, body = ObjectStore(), Body(limit_s=60)
    await lead(lock(store), body)
    assert body.epoch == 1
    assert body.ended_s - body.started_s == pytest.approx(60)
    assert "holderIdentity" not in spec(store)
    assert spec(store)["leaseTransitions"] == 0


@simulated
async def test_each_term_has_a_higher_epoch_even_that_of_the_same_process() -> None:
    store = ObjectStore()
    mine = lock(store)
    bodies = [Body(limit_s=1) for _ in range(3)]
    for body in bodies:
        await lead(mine, body)
    assert [body.epoch for body in bodies] == [1, 2, 3]


@simulated
async def test_a_second_contender_leads_as_soon_as_the_first_releases_the_lease() -> None:
    store, first, second = ObjectStore(), Body(limit_s=100), Body(limit_s=1)
    one = asyncio.ensure_future(lead(lock(store, "a"), first))
    await first.started.wait()
    waiting = lock(store, "b")
    await lead(waiting, second)
    await one
    assert first.ended_s <= second.started_s <= first.ended_s + TERMS.retry_s + 0.01
    assert (first.epoch, second.epoch) == (1, 2)


@simulated
async def test_a_follower_knows_the_leader() -> None:
    store = ObjectStore()
    await lock(store, "pod-1").try_hold()
    other = lock(store, "pod-2")
    with pytest.raises(HeldByAnother):
        await other.try_hold()
    assert other.leader == "pod-1"


@simulated
async def test_a_hung_renewal_ends_leadership_before_anyone_can_take_over() -> None:
    store, body = ObjectStore(), Body()
    store.faults = [None, None, None, *[HANG] * 100]  # look, create, one renewal
    with pytest.raises(LeaseLost, match="not renewed within 10 s"):
        await lead(lock(store), body)
    last_renewal_s = body.started_s + TERMS.retry_s
    assert body.ended_s == pytest.approx(last_renewal_s + TERMS.deadline_s)


@simulated
async def test_a_leader_that_was_stopped_does_not_count_as_leader_and_does_not_renew() -> None:
    store = ObjectStore()
    found: list[float] = []

    async def body(term: Leadership) -> None:
        loop: Any = asyncio.get_running_loop()
        loop._jumping.now_s += 30  # SIGSTOP, SIGCONT
        found.append(term.left_s)
        await asyncio.sleep(1e5)

    with pytest.raises(LeaseLost):
        await lead(lock(store), body)
    assert found == [pytest.approx(-20)]
    assert store.writes == [("create", "leader"), ("replace", "leader")]  # the second one releases it


async def nobody(_epoch: int) -> str:
    return ""


OUTAGE = [None, None, *[LOST_REQUEST] * 30]  # look, create, then a minute of renewals


@simulated
async def test_a_leader_without_a_rival_outlasts_an_api_server_that_is_away() -> None:
    store = ObjectStore()
    store.faults = OUTAGE
    found: list[float] = []

    async def body(term: Leadership) -> None:
        for _ in range(80):
            await asyncio.sleep(1.0)
            found.append(term.left_s)
        assert term.epoch == 1

    await lead(lock(store), body, nobody)
    assert min(found) < -45, "the term was over, so effects without an epoch had to wait"
    assert found[-1] > 0
    assert spec(store)["leaseTransitions"] == 0


@simulated
async def test_a_rival_is_asked_for_after_each_renewal_that_fails_and_ends_the_term() -> None:
    store, body = ObjectStore(), Body()
    store.faults = [None, None, None, LOST_REQUEST, None, None, *DOWN]
    asked: list[float] = []

    async def rival(epoch: int) -> str:
        asked.append(now_s() - body.started_s)
        assert epoch == 1
        return "pod-2" if len(asked) > 3 else ""

    with pytest.raises(LeaseLost, match="pod-2 leads with a higher epoch"):
        await lead(lock(store), body, rival)
    assert asked == [pytest.approx(number * TERMS.retry_s) for number in (2, 4, 5, 6)]
    assert body.ended_s == pytest.approx(body.started_s + asked[-1])


@pytest.mark.parametrize(
    ("holder", "why"),
    [("pod-2_1", "pod-2_1 holds the lease"), ("", "another process held the lease in the meantime")],
    ids=["held", "held and given back"],
)
@simulated
async def test_a_lease_that_another_took_during_the_outage_is_lost(holder: str, why: str) -> None:
    store, body = ObjectStore(), Body()
    store.faults = OUTAGE
    leading = asyncio.ensure_future(lead(lock(store), body, nobody))
    await body.started.wait()
    await asyncio.sleep(30)
    assert not leading.done()
    store.change("leases", "ns", "leader", {"holderIdentity": holder, "leaseTransitions": 4})
    with pytest.raises(LeaseLost, match=why):
        await leading


@simulated
async def test_a_server_that_refuses_for_a_minute_ends_a_term_that_is_over() -> None:
    """The server responds, so another process can be elected."""
    store, body = ObjectStore(), Body()
    store.faults = [None, None, *[Forbidden("PUT leases", "no", 403)] * 100]
    with pytest.raises(LeaseLost, match="not renewed within 10 s"):
        await lead(lock(store), body, nobody)
    passed_s = body.ended_s - body.started_s
    assert REFUSED_S <= passed_s <= REFUSED_S + 2 * TERMS.retry_s + 0.01


@simulated
async def test_a_server_that_refuses_ends_a_term_on_time_if_no_rival_can_be_asked() -> None:
    store, body = ObjectStore(), Body()
    store.faults = [None, None, *[Forbidden("PUT leases", "no", 403)] * 100]
    with pytest.raises(LeaseLost, match="not renewed within 10 s"):
        await lead(lock(store), body)
    assert body.ended_s <= body.started_s + TERMS.deadline_s + TERMS.retry_s


@simulated
async def test_a_server_that_starts_and_refuses_once_does_not_end_the_term() -> None:
    store, body = ObjectStore(), Body(limit_s=100)
    store.faults = [*OUTAGE, Forbidden("PUT leases", "not read yet", 403)]
    await lead(lock(store), body, nobody)
    assert body.epoch == 1
    assert spec(store)["leaseTransitions"] == 0


@simulated
async def test_a_rival_ends_a_term_that_is_over_while_the_server_refuses() -> None:
    store, body = ObjectStore(), Body()
    store.faults = [None, None, *[Forbidden("PUT leases", "no", 403)] * 100]

    async def rival(_epoch: int) -> str:
        return "pod-2"

    with pytest.raises(LeaseLost, match="pod-2 leads"):
        await lead(lock(store), body, rival)
    assert body.ended_s - body.started_s <= TERMS.deadline_s + TERMS.retry_s + 0.01


@simulated
async def test_a_restarted_container_leads_at_once_with_a_higher_epoch() -> None:
    store, second = ObjectStore(), Body(limit_s=1)
    await LeaseLock(store, "ns", "leader", "pod-1", TERMS, pod_uid="uid", clock=now_s).try_hold()
    begun_s = now_s()
    await lead(LeaseLock(store, "ns", "leader", "pod-1", TERMS, pod_uid="uid", clock=now_s), second)
    assert second.epoch == 2
    assert second.started_s - begun_s < 0.01


@pytest.mark.parametrize(
    ("pod", "uid"), [("pod-1", "uid2"), ("pod-1", ""), ("pod-1", "u"), ("pod-11", "uid")]
)
@simulated
async def test_the_lease_of_another_pod_is_not_taken_over_at_once(pod: str, uid: str) -> None:
    store = ObjectStore()
    await LeaseLock(store, "ns", "leader", "pod-1", TERMS, pod_uid="uid", clock=now_s).try_hold()
    with pytest.raises(HeldByAnother):
        await LeaseLock(store, "ns", "leader", pod, TERMS, pod_uid=uid, clock=now_s).try_hold()


@simulated
async def test_a_successor_waits_the_whole_duration_on_its_own_clock() -> None:
    store, first, second = ObjectStore(), Body(), Body(limit_s=1)
    line = Line(store)
    one = asyncio.ensure_future(lead(lock(line, "a"), first))
    await first.started.wait()
    follower = asyncio.ensure_future(lead(lock(store, "b"), second))
    await asyncio.sleep(100)
    line.cut = True
    with pytest.raises(LeaseLost):
        await one
    await follower
    margin_s = TERMS.duration_s - TERMS.deadline_s
    assert second.started_s - first.ended_s >= margin_s
    assert second.started_s - first.ended_s <= margin_s + 2 * TERMS.retry_s
    assert second.epoch == 2


@simulated
async def test_wall_clocks_do_not_matter() -> None:
    """A renewTime of last year counts as a renewal if it changes; one of next year does not if it stays."""
    store = ObjectStore()
    await lock(store, "a").try_hold()
    other = lock(store, "b")
    for year in range(2001, 2010):
        store.change("leases", "ns", "leader", {"renewTime": f"{year}-01-01T00:00:00.000000Z"})
        with pytest.raises(HeldByAnother):
            await other.try_hold()
        await asyncio.sleep(10)
    store.change("leases", "ns", "leader", {"renewTime": "2999-01-01T00:00:00.000000Z"})
    await held_for(other, 14.9)
    with pytest.raises(HeldByAnother):
        await other.try_hold()
    await asyncio.sleep(0.2)
    assert await other.try_hold() == 2


@simulated
async def test_the_duration_is_the_one_that_the_holder_wrote() -> None:
    store = ObjectStore()
    await lock(store, "a", LeaseTerms(60, 40.0, 5.0)).try_hold()
    other = lock(store, "b")
    await held_for(other, 59.9)
    await asyncio.sleep(0.2)
    assert await other.try_hold() == 2


@pytest.mark.parametrize("broken", [None, 0, -3, "15"])
@simulated
async def test_a_lease_without_a_duration_lasts_as_long_as_this_process_would_hold_it(broken: object) -> None:
    store = ObjectStore()
    await lock(store, "a").try_hold()
    store.change("leases", "ns", "leader", {"leaseDurationSeconds": broken, "leaseTransitions": broken})
    other = lock(store, "b")
    await held_for(other, 14.9)
    await asyncio.sleep(0.2)
    assert await other.try_hold() >= 2


@pytest.mark.parametrize("fault", [LOST_ANSWER, HANG_AFTER])
@pytest.mark.parametrize("request_of_term", [1, 2, 3, 4])
@simulated
async def test_a_write_whose_answer_was_lost_is_recognized(fault: str, request_of_term: int) -> None:
    """Request 0 reads, request 1 creates, and the others renew."""
    store, body = ObjectStore(), Body(limit_s=60)
    store.faults = [None] * request_of_term + [fault]
    await lead(lock(store), body)
    assert body.epoch == 1
    assert body.cancelled == 0
    assert spec(store)["leaseTransitions"] == 0


@simulated
async def test_a_brief_api_failure_is_survived() -> None:
    store, body = ObjectStore(), Body(limit_s=60)
    store.faults = [None, None, None, LOST_REQUEST, LOST_REQUEST, None]
    await lead(lock(store), body)
    assert body.ended_s - body.started_s == pytest.approx(60)


@simulated
async def test_one_hung_attempt_leaves_time_for_a_second_one() -> None:
    store, body = ObjectStore(), Body(limit_s=60)
    store.faults = [None, None, HANG]
    await lead(lock(store), body)
    assert body.cancelled == 0


@simulated
async def test_a_renewal_that_takes_long_counts_from_when_it_was_sent() -> None:
    store, body = ObjectStore(), Body()
    store.faults = [None, None, 4.0, *DOWN]
    with pytest.raises(LeaseLost):
        await lead(lock(store), body)
    assert body.ended_s == pytest.approx(body.started_s + TERMS.retry_s + TERMS.deadline_s)


@simulated
async def test_another_holder_ends_leadership_at_once() -> None:
    store, body = ObjectStore(), Body()
    leading = asyncio.ensure_future(lead(lock(store), body))
    await body.started.wait()
    store.change("leases", "ns", "leader", {"holderIdentity": "admin_1", "renewTime": "x"})
    changed_s = now_s()
    with pytest.raises(LeaseLost, match="admin_1 holds the lease"):
        await leading
    assert body.ended_s <= changed_s + TERMS.retry_s
    assert spec(store)["holderIdentity"] == "admin_1"  # not released, because it is not ours


@simulated
async def test_an_edit_that_keeps_the_holder_is_not_a_loss() -> None:
    store, body = ObjectStore(), Body(limit_s=30)
    leading = asyncio.ensure_future(lead(lock(store), body))
    await body.started.wait()
    store.change("leases", "ns", "leader", {"note": "an annotation, say"})
    await leading
    assert body.cancelled == 0


@simulated
async def test_a_deleted_lease_is_left_to_its_last_holder_as_if_it_were_silent() -> None:
    store = ObjectStore()
    first, other = lock(store, "a"), lock(store, "b")
    await first.try_hold()
    epoch = await first.raise_above(40)
    await held_for(other, TERMS.retry_s)
    store.objects.clear()
    with pytest.raises(HeldByAnother, match=first.holder):
        await other.try_hold()
    assert await first.try_hold() == epoch, "a holder that is well creates it again"
    await held_for(other, TERMS.duration_s - TERMS.retry_s)
    store.objects.clear()
    await held_for(other, TERMS.duration_s)
    assert await other.try_hold() > epoch
    with pytest.raises(HeldByAnother):
        await first.try_hold()


@simulated
async def test_a_deleted_lease_is_taken_at_once_if_its_holder_has_released_it_or_ended() -> None:
    store = ObjectStore()
    first, other = lock(store, "a"), lock(store, "b")
    epoch = await first.try_hold()
    await held_for(other, TERMS.retry_s)
    store.objects.clear()
    other.note_ended(first.holder)
    assert await other.try_hold() == epoch + 1
    await other.release()
    first.begin()
    assert await first.try_hold() == epoch + 2
    await first.release()
    store.objects.clear()
    other.begin()
    assert await lock(store, "c").try_hold() == 1, "one that has never seen the lease cannot know more"
    store.objects.clear()
    first.begin()
    assert await first.try_hold() == epoch + 3


@simulated
async def test_a_lease_that_was_restored_from_a_backup_gives_no_earlier_epoch() -> None:
    store = ObjectStore()
    first, other = lock(store, "a"), lock(store, "b")
    await first.try_hold()
    epoch = await first.raise_above(40)
    await held_for(other, TERMS.retry_s)
    store.change("leases", "ns", "leader", {"holderIdentity": "c", "leaseTransitions": 3})
    await held_for(other, TERMS.duration_s)
    assert await other.try_hold() == epoch + 1


@simulated
async def test_a_deleted_lease_is_created_again_with_the_same_epoch() -> None:
    store, body = ObjectStore(), Body(limit_s=30)
    await lead(lock(store, "earlier"), Body(limit_s=1))
    leading = asyncio.ensure_future(lead(lock(store), body))
    await body.started.wait()
    store.objects.clear()
    await leading
    assert body.epoch == 2
    assert body.cancelled == 0
    assert spec(store)["leaseTransitions"] == 1


@simulated
async def test_an_epoch_is_raised_above_one_that_members_know() -> None:
    store = ObjectStore()

    async def body(term: Leadership) -> None:
        await term.raise_above(41)
        await term.raise_above(7)
        assert term.epoch == 42
        await asyncio.sleep(30)  # renewals keep the epoch
        assert term.epoch == 42
        with pytest.raises(ValueError, match="no epoch is above"):
            await term.raise_above(MAX_EPOCH)

    await lead(lock(store), body)
    successor = Body(limit_s=1)
    await lead(lock(store, "b"), successor)
    assert successor.epoch == 43


@simulated
async def test_a_deposed_leader_cannot_raise_its_epoch() -> None:
    store = ObjectStore()
    errors: list[Exception] = []

    async def body(term: Leadership) -> None:
        store.change("leases", "ns", "leader", {"holderIdentity": "b_1", "leaseTransitions": 1})
        try:
            await term.raise_above(5)
        except LeaseLost as error:
            errors.append(error)
            raise

    with pytest.raises(LeaseLost):
        await lead(lock(store), body)
    assert len(errors) == 1
    assert spec(store)["leaseTransitions"] == 1


@simulated
async def test_a_body_that_fails_releases_the_lease_at_once() -> None:
    store = ObjectStore()

    async def body(term: Leadership) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        await lead(lock(store), body)
    assert "holderIdentity" not in spec(store)


@simulated
async def test_the_body_is_cancelled_once_and_unwinds_while_the_lease_is_held() -> None:
    store, body = ObjectStore(), Body(unwind_s=4.5)
    leading = asyncio.ensure_future(lead(lock(store), body))
    await body.started.wait()
    other = lock(store, "b")
    for _ in range(40):  # as `event_loop.end` does
        leading.cancel()
        await asyncio.sleep(0.1)
        with pytest.raises(HeldByAnother):
            await other.try_hold()
    with pytest.raises(asyncio.CancelledError):
        await leading
    assert body.cancelled == 1
    assert body.ended_s == pytest.approx(now_s())
    assert "holderIdentity" not in spec(store)


@simulated
async def test_a_body_that_swallows_its_cancellation_is_cancelled_again() -> None:
    store = ObjectStore()
    ended: list[int] = []

    async def body(term: Leadership) -> None:
        for swallowed in range(3):
            try:
                await asyncio.sleep(1e5)
            except asyncio.CancelledError:
                ended.append(swallowed)

    leading = asyncio.ensure_future(lead(lock(store), body))
    await asyncio.sleep(1)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("fault", [HANG, HANG_AFTER])
@simulated
async def test_cancelling_a_waiting_contender_leaves_no_lease_behind(fault: str) -> None:
    store = ObjectStore()
    store.faults = [None, fault]
    leading = asyncio.ensure_future(lead(lock(store), Body()))
    await asyncio.sleep(1)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    held = store.objects.get(("leases", "ns", "leader"), {"spec": {}})["spec"]
    assert "holderIdentity" not in held


@simulated
async def test_a_release_that_hangs_does_not_delay_the_process() -> None:
    store, body = ObjectStore(), Body(limit_s=1)
    store.faults = [None, None, HANG]
    await lead(lock(store), body)
    assert now_s() <= body.ended_s + TERMS.retry_s + 0.01


@simulated
async def test_waiting_continues_while_the_server_refuses_or_is_away() -> None:
    store, body = ObjectStore(), Body(limit_s=1)
    store.faults = [Forbidden("GET leases", "no", 403), LOST_REQUEST, HANG, LOST_REQUEST]
    await lead(lock(store), body)
    assert body.epoch == 1


@simulated
async def test_of_many_contenders_one_leads_at_a_time() -> None:
    store = ObjectStore()
    spans: list[tuple[float, float, int]] = []

    async def contend(identity: str) -> None:
        body = Body(limit_s=5)
        await lead(lock(store, identity), body)
        spans.append((body.started_s, body.ended_s, body.epoch))

    await asyncio.gather(*(contend(f"pod-{n}") for n in range(8)))
    spans.sort()
    assert [epoch for _, _, epoch in spans] == list(range(1, 9))
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))


@pytest.mark.parametrize("terms", [(15, 15.0, 2.0), (15, 10.0, 5.0), (15, 10.0, 0.0)])
def test_impossible_terms_are_refused(terms: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="lease terms"):
        LeaseTerms(*terms)
