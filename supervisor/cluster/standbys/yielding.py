"""Choose the idle standbys that yield to a pod without a node. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from supervisor.cluster.standbys.node_fit import NodeRoom, PodNeeds, fits, is_kept_away, lacking

# a pod with a lower priority may exist only to hold room for others, as autoscaler guides advise
PLACEHOLDER = 0


@dataclass(frozen=True, slots=True)
class Yielding:
    """Standbys to delete, all on one node, and the resource that the waiting pod lacks there."""

    standbys: tuple[PodNeeds, ...]
    resource: str


@dataclass(frozen=True, slots=True)
class NodeStandbys:
    """A node with its idle standbys. It is the same for all waiting pods, so it is computed only once."""

    room: NodeRoom
    standbys: tuple[PodNeeds, ...]
    emptied: NodeRoom  # the node without all of them


def read_standbys(room: NodeRoom, idle: Collection[str]) -> NodeStandbys:
    """Return a node with its idle standbys. `idle` contains the uids of idle standbys."""
    found = tuple(each for each in room.pods if each.uid in idle)
    return NodeStandbys(room, found, room.without({each.uid for each in found}))


def choose(pod: PodNeeds, nodes: Iterable[NodeStandbys], idle: Collection[str]) -> Yielding | None:
    """Return the fewest standbys to delete on one node to make the pod fit there; None if it cannot fit.

    `idle` contains the uids of the standbys that may be deleted. None is chosen if the pod already fits.
    """
    best: Yielding | None = None
    for node in nodes:
        found = _on_node(pod, node, idle)
        if found is not None and (best is None or len(found.standbys) < len(best.standbys)):
            best = found
            if len(best.standbys) == 1:
                break
    return best


def _on_node(pod: PodNeeds, node: NodeStandbys, idle: Collection[str]) -> Yielding | None:
    room = node.room
    # This rules out most nodes, whichever of their standbys may yield to this pod.
    if not node.standbys or lacking(pod, node.emptied):
        return None
    able = [
        each for each in node.standbys if each.uid in idle and pod.priority >= min(PLACEHOLDER, each.priority)
    ]
    lacks = lacking(pod, room)
    if not able or not lacks or is_kept_away(pod, room.without({each.uid for each in able})):
        return None
    able.sort(key=lambda each: (each.priority, each.place))
    chosen = next(([each] for each in able if fits(pod, room.without({each.uid}))), able)
    if chosen is able:
        for number in range(2, len(able) + 1):
            if fits(pod, room.without({each.uid for each in able[:number]})):
                chosen = able[:number]
                break
        else:
            return None
    return Yielding(tuple(chosen), lacks[0])
