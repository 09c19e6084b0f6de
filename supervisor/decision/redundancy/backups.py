"""Choose for each member the backup that keeps a copy of its ranks' private states. Pure.

Members on one node are lost together, and members in one rack often are. A backup is therefore on another
node, and in another rack if there is one. A member reports its own node. The rack comes from the node's
labels in the cluster; it is "" if no label names one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.view.model import MemberView, View

# The most members whose private states one member should keep. In each step, the member waits for these
# states, and it needs memory for them. A node has few members, but a rack can have nearly all members of a
# job.
MOST_KEPT = 4


@dataclass(frozen=True, slots=True, order=True)
class MemberPlace:
    """Where a member is. A `rack` of "" is unknown."""

    rack: str
    node: str

    def distance(self, other: MemberPlace) -> int:
        """Return 0 for the same node, 1 for another node, and 2 for a node that is in another rack."""
        if self.node == other.node:
            return 0
        return 2 if self.rack and other.rack and self.rack != other.rack else 1


def place_of(member: MemberView | None, name: str) -> MemberPlace:
    """Return the place of the member `name`. If it has never reported, it is assumed to be alone."""
    if member is None or member.report is None:
        return MemberPlace("", f"member {name}")
    return MemberPlace(member.rack, member.report.node)


def places_of(view: View, placement: Sequence[str]) -> list[MemberPlace]:
    """Return the places of the members in `placement`, in order."""
    return [place_of(view.member(name), name) for name in placement]


def choose(view: View, placement: tuple[str, ...]) -> tuple[int, ...]:
    """Return `Launch.backups` for the next generation: for each member, the position of its backup.

    Each backup is as far away as possible: in another rack, or if that is not possible, on another node. The
    result is () if each member's backup would simply be the next member in the placement, or if all members
    are on one node.
    """
    return backups_of(places_of(view, placement))


def backups_of(places: Sequence[MemberPlace]) -> tuple[int, ...]:
    """Return the positions of the backups of the members in `places`; see `choose`.

    If possible, each member keeps the states of exactly one other member.
    """
    count = len(places)
    wanted = _wanted_distances(places)
    by_place = sorted(range(count), key=lambda position: (places[position], position))
    racks, nodes = [each.rack for each in places], [each.node for each in places]
    largest = [max(Counter(each).values(), default=0) for each in (racks, nodes)]
    orders = [(list(range(count)), 1), *((by_place, shift) for shift in (*largest, count // 2))]
    for number, (order, shift) in enumerate(orders):
        found = {each: order[(at + shift) % count] for at, each in enumerate(order)}
        if all(places[each].distance(places[to]) >= wanted[each] for each, to in found.items()):
            return tuple(found[each] for each in range(count)) if number else ()
    return _shared_backups(places, wanted)


def _wanted_distances(places: Sequence[MemberPlace]) -> list[int]:
    """Return how far away from each member its backup has to be.

    A backup on another node is far enough away if the rack is too large, that is, if each member of the other
    racks would have to keep the states of more than `MOST_KEPT` members.
    """
    sizes = Counter(each.rack for each in places if each.rack)
    in_racks = sum(sizes.values())
    several = len({each.node for each in places}) > 1
    return [
        2 if each.rack and 0 < sizes[each.rack] <= MOST_KEPT * (in_racks - sizes[each.rack]) else int(several)
        for each in places
    ]


def _shared_backups(places: Sequence[MemberPlace], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return backups that keep the states of several members, because one node or rack has most members.

    Of the members that are far enough away, the one that keeps the fewest states is chosen.
    """
    loads = [0] * len(places)
    racks: dict[str, list[tuple[int, int]]] = {}  # heaps of (load, position); a load may be outdated
    nodes: dict[str, list[tuple[int, int]]] = {}
    for position, place in enumerate(places):
        if place.rack:
            racks.setdefault(place.rack, []).append((0, position))
        nodes.setdefault(place.node, []).append((0, position))
    found: list[int] = []
    for place, distance in zip(places, wanted, strict=True):
        heaps, own = (racks, place.rack) if distance == 2 else (nodes, place.node)
        _, backup = min(_least(heap, loads) for key, heap in heaps.items() if key != own)
        loads[backup] += 1
        found.append(backup)
    return tuple(found)


def _least(heap: list[tuple[int, int]], loads: Sequence[int]) -> tuple[int, int]:
    """Return the smallest load in the heap with its position, after bringing the heap's top up to date."""
    while heap[0][0] != loads[heap[0][1]]:
        position = heap[0][1]
        heapq.heapreplace(heap, (loads[position], position))
    return heap[0]
