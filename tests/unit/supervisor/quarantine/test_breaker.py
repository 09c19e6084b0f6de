from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.quarantine import breaker
from supervisor.quarantine.breaker import Breaker
from supervisor.quarantine.model import PREFER_NOT, NodePolicy, NodeView, Quarantine
from tests.unit.supervisor.node_views import POLICY, well

TAINTED = Quarantine(("k",), "replace", ("kmsg",), "b1", 0.0)
WEAK = Quarantine(("k",), "none", ("kmsg",), "b1", 0.0, PREFER_NOT)


def test_a_node_counts_as_out_whoever_took_it_out() -> None:
    odd = [well("a", quarantine=TAINTED), well("b", cordoned=True), well("c", ready=False), well("d")]
    stands = breaker.assess(100, odd, POLICY)
    assert (stands.out, stands.allowed, stands.room) == (3, 10, 7)


def test_nodes_that_others_took_out_do_not_use_up_the_number_that_may_always_be_out() -> None:
    for size in range(3, 20):
        stands = breaker.assess(size, [well("a", cordoned=True)], POLICY)
        assert (stands.out, stands.allowed, stands.room) == (1, 2, 1), size
    ours = [well("a", cordoned=True), well("b", quarantine=TAINTED)]
    assert breaker.assess(19, ours, POLICY).room == 0, "Holdfast has taken out one itself"
    assert breaker.assess(2, [well("a", cordoned=True)], POLICY).room == 0, "one node must be left"
    many = [well(f"n{at}", ready=False) for at in range(40)]
    assert breaker.assess(100, many, POLICY).room == 1, "more are lost than may be out"


def test_a_node_is_counted_once() -> None:
    assert breaker.assess(100, [well("a", quarantine=TAINTED, cordoned=True, ready=False)], POLICY).out == 1


def test_a_node_that_is_only_avoided_counts_as_serving() -> None:
    assert breaker.assess(100, [well("a", quarantine=WEAK)], POLICY).out == 0


def test_a_small_pool_may_lose_one_and_a_pool_of_one_none() -> None:
    assert breaker.assess(3, [], POLICY).room == 1
    assert breaker.assess(1, [], POLICY).room == 0
    assert breaker.assess(0, [], POLICY).room == 0


def test_nodes_that_cannot_be_seen_do_not_count_as_serving() -> None:
    policy = NodePolicy(min_serving=90)
    unseen = [well(f"u{at}", silent_s=1e6) for at in range(8)]
    stands = breaker.assess(100, unseen, policy)
    assert (stands.room, stands.unknown) == (2, 8)
    assert breaker.assess(100, [*unseen, *(NodeView(f"n{at}") for at in range(4))], policy).room == 0
    assert "90 must be left" in breaker.assess(100, [NodeView(f"n{at}") for at in range(12)], policy).why


@given(st.integers(0, 500), st.integers(0, 60), st.floats(0, 1), st.integers(0, 20), st.integers(0, 300))
def test_the_available_room_never_exceeds_share_or_floor(
    total: int, out: int, share: float, min_out: int, min_serving: int
) -> None:
    policy = NodePolicy(max_share=share, min_out=min_out, min_serving=min_serving)
    odd = [well(f"a{at}", cordoned=True) for at in range(min(out, total))]
    stands = breaker.assess(total, odd, policy)
    assert stands.room >= 0
    if stands.room:
        assert stands.out + stands.room <= max(stands.out + min_out, int(share * total))
        assert total - stands.out - stands.room >= min_serving


def test_a_node_that_is_out_does_not_count_as_unknown() -> None:
    """A node without a report does not count as serving either."""
    silent = NodeView("n0")
    nodes = [well("a"), silent, well("u", silent_s=120.1), well("v", silent_s=120.0)]
    nodes += [well("o", quarantine=TAINTED, silent_s=1e6), NodeView("p", cordoned=True)]
    policy = NodePolicy(max_share=0.29, min_out=2, min_serving=3)
    assert breaker.assess(10, nodes, policy) == Breaker(10, 2, 2, 3, 3)
    assert breaker.assess(1, [], policy) == Breaker(1, 0, 0, 1, 3), (
        "the limit cannot exceed the number of nodes"
    )


@pytest.mark.parametrize(
    ("state", "room", "why"),
    [
        (Breaker(100, 3, 0, 10, 1), 7, "3 of 100 nodes are out; at most 10 may be"),
        (Breaker(100, 10, 0, 10, 1), 0, "10 of 100 nodes are out; at most 10 may be"),
        (Breaker(100, 12, 0, 10, 1), 0, "12 of 100 nodes are out; at most 10 may be"),
        (Breaker(20, 2, 8, 10, 2), 8, "2 of 20 nodes are out; at most 10 may be"),
        (Breaker(20, 2, 9, 10, 2), 7, "9 of 20 nodes are known to serve; at least 2 must be left"),
        (Breaker(20, 2, 17, 10, 2), 0, "1 of 20 nodes are known to serve; at least 2 must be left"),
    ],
)
def test_a_breaker_states_its_room_and_the_reason(state: Breaker, room: int, why: str) -> None:
    assert (state.room, state.why) == (room, why)
