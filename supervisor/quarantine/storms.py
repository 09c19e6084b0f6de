"""Detect storms, in which many nodes become unhealthy together from a cause outside them. Pure.

Taking such nodes out would not help. A storm is detected from the current state of the nodes, so a restart of
the deciding process loses nothing. There are two signs of a storm:

- Many nodes of the pool, or several nodes of one rack, had trouble within a short window. The cause may be a
  switch, a file system or a driver roll-out. The pool or rack is left alone until a full cool-down passes
  without another node in trouble. Nodes that are still unhealthy are then taken out only if the breaker has
  room for all of them; otherwise an operator must find out what they have in common.
- Too many agents of one version report "unhealthy" (`cohorts`). The reports of that version are then not
  trusted.

A storm only delays actions. Flapping nodes can prolong it forever, so it delays a node with a fault of its
own by at most one cool-down. Such a fault is corroborated, only a remedy can end it, and fewer than
`rack_nodes` nodes of the storm have the same fault. Only a storm that is too large to consist of flapping
nodes may delay such a node longer, and the delay becomes an alert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from supervisor.quarantine import cohorts, evidence, waivers
from supervisor.quarantine.breaker import is_out, is_unknown
from supervisor.quarantine.cohorts import Reason
from supervisor.quarantine.model import NodeFinding, NodePolicy, NodeView, PoolView


class _Trouble(NamedTuple):
    """A node that became unhealthy, or recovered if it is healthy now, `ago_s` seconds ago."""

    ago_s: float
    node: NodeView
    is_bad: bool
    own: frozenset[str] = frozenset()  # signatures of faults that no storm may delay any longer
    signatures: frozenset[str] = frozenset()  # the signatures of all unhealthy findings


@dataclass(frozen=True, slots=True)
class StormState:
    """The reasons to postpone actions: `everywhere` for all nodes, `nodes` for single nodes by name.

    `crowd` contains the nodes that became unhealthy together with many others. Either all of them are taken
    out or none. `everywhere` does not apply to the nodes in `apart`, which have their own faults.
    """

    everywhere: Reason | None = None
    nodes: Mapping[str, Reason] = field(default_factory=dict)
    crowd: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()

    def reason_for(self, node: str) -> Reason | None:
        """Return why no action is taken on `node`; None if actions are allowed."""
        return (None if node in self.apart else self.everywhere) or self.nodes.get(node)


def detect(pool: PoolView, candidates: Sequence[NodeView], policy: NodePolicy) -> StormState:
    """Return the storms in the pool. `candidates` must contain every node with current or recent trouble."""
    found = _troubles(candidates, pool.now_s, policy)
    troubles = sorted(found, key=lambda each: (each.ago_s, each.node.name))
    if not troubles:
        return StormState()
    held = cohorts.suspects(pool, [each.node for each in troubles if each.is_bad], policy)
    troubles = [each for each in troubles if each.node.name not in held]
    total, everyone = len(pool.nodes), troubles
    crowds: set[str] = set()
    for rack, here in sorted(_by_rack(troubles).items()):
        crowd = _together(here, policy.rack_nodes, policy)
        apart = _apart(here, crowd, total, policy)
        crowds |= _names(crowd) - apart
        # A rack counts as one node of the pool: trouble in many racks is a storm of the pool, but trouble in
        # one rack is not.
        counted = _names(crowd[1:])
        troubles = [each for each in troubles if each.node.name not in counted]
        storm = _storm(crowd, pool.now_s, policy, f"rack {rack}")
        if storm is not None:
            held.update((name, storm) for name in _names(here) - apart)
    need = max(policy.storm_nodes, int(policy.storm_share * total))
    together = _together(troubles, need, policy)
    everywhere = _storm(together, pool.now_s, policy, "the pool")
    apart = _apart(everyone, together, total, policy)
    bad = {each.node.name for each in everyone if each.is_bad}
    crowded = frozenset((crowds | _names(together) - apart) & bad)
    return StormState(everywhere, held, crowded, apart if everywhere is not None else frozenset())


def _names(troubles: Sequence[_Trouble]) -> set[str]:
    return {each.node.name for each in troubles}


def _troubles(candidates: Iterable[NodeView], now_s: float, policy: NodePolicy) -> Iterable[_Trouble]:
    """Yield the nodes that are or recently were unhealthy.

    Even brief trouble is a storm if many nodes have it.
    """
    for node in candidates:
        if node.report is None or node.cordoned or is_unknown(node, policy):
            continue  # someone is working on a cordoned node, so trouble is expected there
        found = waivers.counted_or_all(node, now_s, policy)
        if found:
            own = _signatures(
                [each for each in found if _is_due(each, node.silent_s, policy) and evidence.is_sure(each)]
            )
            yield _Trouble(evidence.age_s(node, found), node, True, own, _signatures(found))
        # a node that is out may be under repair
        elif node.report.calmed_s < policy.memory_s and not is_out(node):
            yield _Trouble(node.silent_s + node.report.calmed_s, node, False)


def _is_due(finding: NodeFinding, silent_s: float, policy: NodePolicy) -> bool:
    return silent_s + finding.held_s >= policy.cooldown_s


def _signatures(findings: Iterable[NodeFinding]) -> frozenset[str]:
    return frozenset(each.signature or each.key for each in findings)


def _apart(
    troubles: Sequence[_Trouble], crowd: Sequence[_Trouble], total: int, policy: NodePolicy
) -> frozenset[str]:
    """Return the nodes with faults of their own that a storm of `crowd` may no longer delay."""
    if len(crowd) > max(2 * policy.storm_nodes, int(policy.max_share * total)):
        return frozenset()
    return frozenset(
        each.node.name
        for each in troubles
        if any(sum(1 for one in crowd if own in one.signatures) < policy.rack_nodes for own in each.own)
    )


def _by_rack(troubles: Sequence[_Trouble]) -> dict[str, list[_Trouble]]:
    found: dict[str, list[_Trouble]] = {}
    for each in troubles:
        if each.node.rack:
            found.setdefault(each.node.rack, []).append(each)
    return found


def _together(troubles: Sequence[_Trouble], need: int, policy: NodePolicy) -> list[_Trouble]:
    """Return the nodes of all windows in which at least `need` nodes had trouble.

    `troubles` is sorted, newest first.
    """
    found: dict[str, _Trouble] = {}
    for first, last in zip(range(len(troubles)), range(need - 1, len(troubles)), strict=False):
        if troubles[last].ago_s - troubles[first].ago_s <= policy.storm_window_s:
            found.update((each.node.name, each) for each in troubles[first : last + 1])
    return list(found.values())


def _storm(together: Sequence[_Trouble], now_s: float, policy: NodePolicy, where: str) -> Reason | None:
    newest_s = min((each.ago_s for each in together), default=policy.cooldown_s)
    if newest_s >= policy.cooldown_s:
        return None
    count = f"{len(together)} nodes of {where} had trouble within {policy.storm_window_s:.0f} s of each other"
    return Reason(now_s + policy.cooldown_s - newest_s, f"a storm: {count}")
