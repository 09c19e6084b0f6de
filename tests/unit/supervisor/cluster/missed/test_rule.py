"""Missed pods are evicted only in place of missing members, a few times, and never without an owner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cluster.missed.rule import (
    AGAIN_S,
    FORGET_S,
    MAX_EVICTIONS,
    MOST_AT_ONCE,
    SETTLE_S,
    Evictions,
    MissedPod,
    MissingMembers,
    Order,
    missing_members,
    plan,
)
from supervisor.cluster.pods import PodMember, member_name
from supervisor.view.model import ENDING_PHASES, JobState, Policy

NOW_S = 10_000.0


def missed(number: int, **given: object) -> MissedPod:
    found = MissedPod("team", f"w-{number}", f"uid-{number}", (number,), has_owner=True, seen_s=60.0)
    return replace(found, **given)  # type: ignore[arg-type]


def member(number: int, **given: object) -> PodMember:
    uid, name = f"{number:08x}-0", f"w-{number}"
    found = PodMember(uid, name, member_name(name, uid, 0), "n1", "c", is_running=True, order=(number,))
    return replace(found, **given)  # type: ignore[arg-type]


THREE = Policy(members=3)
SECURING = JobState(world_size=3, nproc=1, phase="securing")


def test_a_job_lacks_the_member_whose_pod_is_gone() -> None:
    found = missing_members(SECURING, THREE, [member(0), member(2)], is_stopping=False)
    assert found == MissingMembers(1, frozenset({(0,), (2,)}))
    assert plan(found, [missed(1)], {}, NOW_S).evict == (missed(1),)


@pytest.mark.parametrize(
    "third",
    [member(1), member(1, is_running=False), member(1, is_running=False, has_ended=True, exit_code=0)],
    ids=["it runs", "it starts", "it has succeeded"],
)
def test_a_job_lacks_no_member_whose_pod_is_there(third: PodMember) -> None:
    assert missing_members(SECURING, THREE, [member(0), third, member(2)], is_stopping=False) is None


@pytest.mark.parametrize(
    "third", [member(1, is_leaving=True), member(1, is_running=False, has_ended=True, exit_code=1)]
)
def test_a_pod_that_leaves_or_has_failed_is_missing(third: PodMember) -> None:
    found = missing_members(SECURING, THREE, [member(0), third, member(2)], is_stopping=False)
    assert found == MissingMembers(1, frozenset({(0,), (2,)}))


def test_the_owners_pod_is_the_next_standby_if_the_job_wants_one() -> None:
    standby = member(7, is_standby=True, order=(10**9, 1))
    pods = [member(0), member(2), standby]
    assert missing_members(SECURING, THREE, pods, is_stopping=False) is None
    whole = replace(SECURING, phase="running", settled=True, placement=("a", "b", "c"))
    for memory in (SECURING, whole):
        found = missing_members(memory, replace(THREE, standby=1), pods, is_stopping=False)
        assert found == MissingMembers(1, frozenset({(0,), (2,)})), "the place of a standby is not taken"
    complete = [*pods, member(1)]
    assert missing_members(whole, replace(THREE, standby=1), complete, is_stopping=False) is None
    # The owner has all of its pods, so a standby is missing that Holdfast itself creates.
    assert missing_members(whole, replace(THREE, standby=5), complete, is_stopping=False) is None


@pytest.mark.parametrize("phase", sorted(ENDING_PHASES))
def test_a_job_that_ends_waits_for_nobody(phase: str) -> None:
    memory = replace(SECURING, phase=phase)  # type: ignore[arg-type]
    assert missing_members(memory, THREE, [member(0)], is_stopping=False) is None
    assert missing_members(SECURING, THREE, [member(0)], is_stopping=True) is None


def test_a_group_that_trains_with_all_members_lacks_none() -> None:
    """Its pods may be listed late, and one of them may be about to leave."""
    memory = replace(SECURING, phase="running", settled=True, placement=("a", "b", "c"))
    assert missing_members(memory, THREE, [member(0)], is_stopping=False) is None
    smaller = replace(memory, placement=("a", "b"))
    assert missing_members(smaller, THREE, [member(0), member(1)], is_stopping=False) is not None


def test_a_job_without_any_supervised_pod_is_left_alone() -> None:
    """Its pods may train together without Holdfast."""
    assert missing_members(SECURING, THREE, [], is_stopping=False) is None
    assert missing_members(SECURING, THREE, [member(0, is_leaving=True)], is_stopping=False) is None


def test_a_pod_that_was_only_just_seen_is_not_evicted_yet() -> None:
    lack = MissingMembers(1, frozenset())
    assert plan(lack, [missed(1, seen_s=SETTLE_S - 1)], {}, NOW_S).evict == ()
    assert plan(lack, [missed(1, seen_s=SETTLE_S)], {}, NOW_S).evict == (missed(1, seen_s=SETTLE_S),)


def test_a_pod_without_an_owner_stays_and_the_reason_is_told() -> None:
    found = plan(MissingMembers(1, frozenset()), [missed(1, has_owner=False)], {}, NOW_S)
    assert found.evict == ()
    ((pod, why),) = found.leave
    assert pod.name == "w-1"
    assert "no owner" in why


def test_a_member_is_evicted_a_few_times_with_growing_pauses_and_then_stays() -> None:
    lack, before, now_s, times = MissingMembers(1, frozenset()), Evictions(), NOW_S, []
    for _ in range(100):
        found = plan(lack, [missed(1)], {(1,): before}, now_s)
        if found.evict:
            times.append(now_s)
            before = before.after(now_s)
        if found.leave:
            break
        now_s += 10.0
    assert len(times) == MAX_EVICTIONS
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert all(pause >= limit for pause, limit in zip(pauses, AGAIN_S, strict=False))
    assert "again" in found.leave[0][1]
    assert not before.is_forgotten(now_s)
    assert before.is_forgotten(now_s + FORGET_S)


def test_several_pods_without_an_index_that_are_evicted_at_once_count_once() -> None:
    once = Evictions().after(100.0)
    assert once.after(100.0) == once
    assert once.after(200.0) == Evictions(2, 200.0)


@given(
    count=st.integers(1, 40),
    taken=st.frozensets(st.integers(0, 40)),
    numbers=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(0, 5)), max_size=60),
)
def test_no_more_pods_are_evicted_than_members_are_missing_and_none_in_a_members_place(
    count: int, taken: frozenset[int], numbers: list[tuple[int, bool, int]]
) -> None:
    lack = MissingMembers(count, frozenset((each,) for each in taken))
    pods = [missed(number, uid=f"u{at}", has_owner=owned) for at, (number, owned, _) in enumerate(numbers)]
    before: dict[Order, Evictions] = {
        (number,): Evictions(times, 0.0) for number, _, times in numbers if times
    }
    found = plan(lack, pods, before, NOW_S)
    assert len(found.evict) + len(found.leave) <= count
    assert len(found.evict) <= MOST_AT_ONCE
    for each in found.evict:
        assert each.has_owner
        assert each.order not in lack.taken
        assert before.get(each.order, Evictions()).count < MAX_EVICTIONS
