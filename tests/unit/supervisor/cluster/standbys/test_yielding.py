"""The fewest idle standbys go, and only if the pod then fits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cluster.standbys.node_fit import fits, read_node_room, read_pod_needs
from supervisor.cluster.standbys.yielding import choose, read_standbys
from tests.unit.supervisor.cluster.standbys.cluster_objects import Json, node, pod

IDLE = ("uid-s1", "uid-s2", "uid-s3")


def chosen(wants: Json, *rooms: tuple[Json, list[Json]]) -> tuple[list[str], str] | None:
    found = choose(
        read_pod_needs(wants),
        [
            read_standbys(read_node_room(of, [read_pod_needs(each) for each in pods]), IDLE)
            for of, pods in rooms
        ],
        IDLE,
    )
    return ([each.name for each in found.standbys], found.resource) if found is not None else None


@pytest.mark.parametrize(
    ("wants", "pods", "expected"),
    [
        (pod("w", "2"), [pod("s1", "2", on="n1"), pod("p", "2", on="n1")], (["s1"], "cpu")),
        (pod("w", "3"), [pod("s1", "2", on="n1"), pod("p", "2", on="n1")], None),  # it would not fit either
        (pod("w", "2"), [pod("s1", "2", on="n1")], None),  # it fits beside it
        (pod("w", "2"), [pod("p", "4", on="n1")], None),  # not a standby
        (pod("w", "2", nodeSelector={"zone": "b"}), [pod("s1", "4", on="n1")], None),
        (pod("w", "3"), [pod("s1", "1", on="n1"), pod("s2", "3", on="n1")], (["s2"], "cpu")),
        (pod("w", "4"), [pod("s1", "2", on="n1"), pod("s2", "2", on="n1")], (["s1", "s2"], "cpu")),
        (pod("w", "2", priority=-5), [pod("s1", "4", on="n1")], None),  # a placeholder
        (pod("w", "2", priority=-5), [pod("s1", "4", on="n1", priority=-5)], (["s1"], "cpu")),
        (pod("w", "2"), [pod("s1", "4", on="n1", priority=1000)], (["s1"], "cpu")),
    ],
)
def test_which_standbys_go(wants: Json, pods: list[Json], expected: tuple[list[str], str] | None) -> None:
    assert chosen(wants, (node("n1"), pods)) == expected


def test_a_cordoned_or_tainted_node_frees_nothing() -> None:
    full = [pod("s1", "4", on="n1")]
    assert chosen(pod("w"), (node("n1", unschedulable=True), full)) is None
    taint = {"key": "a", "effect": "NoExecute"}
    assert chosen(pod("w"), (node("n1", taints=[taint]), full)) is None


def test_the_node_where_fewer_standbys_go_is_chosen() -> None:
    first = [pod("s1", "2", on="n1"), pod("s2", "2", on="n1")]
    second = [pod("s3", "4", on="n2")]
    assert chosen(pod("w", "4"), (node("n1"), first), (node("n2"), second)) == (["s3"], "cpu")


_CORES = st.integers(0, 4)


@given(_CORES, st.lists(_CORES, max_size=3), st.lists(_CORES, max_size=2))
def test_what_goes_is_enough_and_nothing_goes_in_vain(
    wanted: int, standbys: list[int], others: list[int]
) -> None:
    pods = [pod(f"s{number}", str(cpu), on="n1") for number, cpu in enumerate(standbys, 1)]
    pods += [pod(f"p{number}", str(cpu), on="n1") for number, cpu in enumerate(others)]
    room = read_node_room(node("n1", "6"), [read_pod_needs(each) for each in pods])
    needs = read_pod_needs(pod("w", str(wanted)))
    found = choose(needs, [read_standbys(room, IDLE)], IDLE)
    there = [each.uid for each in room.pods if each.uid in IDLE]
    groups = [set(some) for count in range(len(there) + 1) for some in combinations(there, count)]
    is_possible = any(fits(needs, room.without(some)) for some in groups)
    if found is None:
        assert fits(needs, room) or not is_possible
    else:
        gone = {each.uid for each in found.standbys}
        assert not fits(needs, room)
        assert fits(needs, room.without(gone))
        assert len(found.standbys) == 1 or not any(fits(needs, room.without({uid})) for uid in there)
