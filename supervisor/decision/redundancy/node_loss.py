"""Find out which state survives the loss of any one node, and what standbys copy to survive it. Pure.

Every member has the replicated state, so this state survives if the group's members are on several nodes. The
private states of a member's ranks are only on the member itself and on its backup (`Launch.backups`).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.member_messages import StateSource
from supervisor.decision import resume_point, state_sources
from supervisor.decision.redundancy import backups
from supervisor.view import interrupted_work
from supervisor.view.model import JobState, Policy, View


def secured_step(view: View, step: int) -> int:
    """Return the newest step whose state survives if any one node is lost; -1 if there is none.

    `step` is a step that all ranks have completed. Its state survives if there is a member on another node,
    and the private states of all ranks on the lost node are also on another node. Otherwise, only an older
    state survives: a checkpoint, or a snapshot on a standby.
    """
    return min((step, *(_newest_without(view, node, step) for node in _unsafe_nodes(view))))


def durable_step(view: View, step: int) -> int:
    """Return the newest step up to `step` that members report to be on storage; -1 if there is none."""
    found = [each.report.durable.step for each in view.members if each.report is not None]
    return min(step, max(found, default=-1))


def _unsafe_nodes(view: View) -> set[str]:
    """Return the nodes whose loss destroys the state of the last step."""
    memory = view.memory
    nodes = [place.node for place in backups.places_of(view, memory.placement)]
    if len(set(nodes)) < 2:
        return set(nodes)
    kept = memory.launch.backups if memory.launch is not None else ()
    if len(kept) != len(nodes):
        kept = tuple((position + 1) % len(nodes) for position in range(len(nodes)))
    return {node for position, node in enumerate(nodes) if node == nodes[kept[position]]}


def _newest_without(view: View, node: str, step: int) -> int:
    """Return the newest step from which the group can resume if it loses `node`; -1 if there is none."""
    left = tuple(each for each in view.members if backups.place_of(each, each.name).node != node)
    found = resume_point.newest(replace(view, members=left), None, interrupted_work.void_states(view))
    return max(durable_step(view, step), found.step if found.source != "none" else -1)


# -- the state on standbys


def mirrored(view: View, policy: Policy, standby: str) -> tuple[StateSource, ...]:
    """Return the members whose state the standby copies in case their node is lost; () for none.

    The first source has the snapshots, and all of them have the private states of their ranks. A copy is
    needed only while all members with ranks are on one node and the standby is on another one.
    """
    memory = view.memory
    if not policy.members_created_externally or memory.phase != "running" or not memory.settled:
        return ()
    places = (backups.place_of(view.member(name), name) for name in memory.placement)
    first = next(places, None)
    own = backups.place_of(view.member(standby), standby)
    if first is None or own.node == first.node or any(each.node != first.node for each in places):
        return ()
    return _sources(memory)


def _sources(memory: JobState) -> tuple[StateSource, ...]:
    peers = state_sources.grouped(memory.peers)
    if not peers or not all(each.url for each in peers):
        return ()
    return (StateSource(peers[0].url, -1, memory.generation), *peers)
