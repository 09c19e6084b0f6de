from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from supervisor.decision.redundancy.backups import MOST_KEPT, MemberPlace, backups_of

PLACES = st.builds(MemberPlace, st.sampled_from(["", "r1", "r2"]), st.sampled_from("abcd")).map(
    lambda place: replace(place, node=f"{place.rack}{place.node}")  # a node is in one rack
)


def places(*nodes: str) -> list[MemberPlace]:
    return [MemberPlace("", node) for node in nodes]


def racks(*found: str) -> list[MemberPlace]:
    """Return places on nodes of their own in these racks."""
    return [MemberPlace(rack, f"n{number}") for number, rack in enumerate(found)]


@given(st.lists(PLACES, min_size=1, max_size=12))
def test_each_backup_is_as_far_away_as_any_other_member(found: list[MemberPlace]) -> None:
    kept = backups_of(found) or tuple((position + 1) % len(found) for position in range(len(found)))
    racks_of = [each.rack for each in found if each.rack]
    for position, backup in enumerate(kept):
        own, farthest = found[position], max(found[position].distance(other) for other in found)
        inside = racks_of.count(own.rack)
        if farthest == 2 and inside > MOST_KEPT * (len(racks_of) - inside):
            farthest = min(farthest, 1)
        assert own.distance(found[backup]) >= farthest


@given(st.lists(PLACES, min_size=2, max_size=12))
def test_each_member_keeps_the_states_of_one_member_if_no_node_has_most_of_them(
    found: list[MemberPlace],
) -> None:
    found = [replace(each, rack="") for each in found]
    nodes = [each.node for each in found]
    kept = backups_of(found)
    if kept and 2 * max(map(nodes.count, nodes)) <= len(nodes):
        assert sorted(kept) == list(range(len(found)))


def test_members_on_nodes_of_their_own_send_to_the_next_member() -> None:
    for count in (1, 2, 3, 8):
        assert backups_of(places(*map(str, range(count)))) == ()


def test_members_on_one_node_send_to_the_next_member() -> None:
    assert backups_of(places("a", "a", "a")) == ()


def test_two_members_on_each_of_two_nodes_keep_the_states_of_the_other_node() -> None:
    assert backups_of(places("a", "a", "b", "b")) == (2, 3, 0, 1)


def test_a_member_alone_on_its_node_keeps_the_states_of_all_others() -> None:
    assert backups_of(places("a", "a", "b")) == (2, 2, 0)


def test_a_backup_is_in_another_rack_if_the_labels_name_one() -> None:
    assert backups_of(racks("x", "x", "y", "y")) == (2, 3, 0, 1)
    assert backups_of(racks("x", "y", "x", "y")) == ()
    assert backups_of(racks("x", "x", "x")) == ()


def test_a_node_without_a_rack_is_not_in_another_rack() -> None:
    first, second, third = racks("x", "", "y")
    assert [first.distance(second), first.distance(third), second.distance(third)] == [1, 2, 1]


def test_a_member_keeps_few_states_even_if_nearly_all_members_are_in_another_rack() -> None:
    assert backups_of(racks("x", "x", "x", "x", "y")) == (4, 4, 4, 4, 0)
    assert backups_of(racks("x", "x", "x", "x", "x", "y")) == (), "other nodes of the rack serve too"
    found = racks(*("x" for _ in range(800)), *("y" for _ in range(200)))
    kept = backups_of(found)
    assert max(map(kept.count, set(kept))) == MOST_KEPT
    assert all(found[each].rack != found[backup].rack for each, backup in enumerate(kept))


def test_two_thousand_members_on_few_nodes_get_backups() -> None:
    found = places(*(f"node-{number % 250}" for number in range(2000)))
    assert backups_of(found) == ()
    found = places(*(f"node-{number // 8}" for number in range(2000)))
    kept = backups_of(found)
    assert sorted(kept) == list(range(2000))
    assert all(found[each].node != found[backup].node for each, backup in enumerate(kept))
