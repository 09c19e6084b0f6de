"""Detect storms: many nodes become unhealthy together, because of a cause outside the nodes. Pure.

Taking such nodes out would not help. A storm is detected from the current state of the nodes, so a restart of
the deciding process loses nothing. There are two signs of a storm:

- Many nodes of the pool, or several nodes of one rack, had trouble within a short window. The cause may be a
  switch, a file system or a driver roll-out. No action is taken on the pool or rack until a full cool-down
  has passed without another node in trouble. Nodes that are unhealthy after that are taken out only if the
  breaker has room for all of them; otherwise an operator must find out what they have in common.
- Too many agents of one version report "unhealthy". The reports of that version are then not trusted. This
  also applies if the only agent of a version reports "unhealthy", because it may be the first of a bad
  roll-out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from supervisor.quarantine import evidence
from supervisor.quarantine.breaker import is_out, is_unknown
from supervisor.quarantine.model import NodePolicy, NodeView, PoolView


class Reason(NamedTuple):
    """The reason why no action is taken, and when to decide again."""

    until_s: float
    why: str


class _Trouble(NamedTuple):
    """A node that became unhealthy, or recovered if it is healthy now, `ago_s` seconds ago."""

    ago_s: float
    node: NodeView
    is_bad: bool


@dataclass(frozen=True, slots=True)
class StormState:
    """The reasons to postpone actions: `everywhere` for all nodes, `nodes` for single nodes by name.

    `crowd` contains the nodes that became unhealthy together with many others. Either all of them are taken
    out or none.
    """

    everywhere: Reason | None = None
    nodes: Mapping[str, Reason] = field(default_factory=dict)
    crowd: frozenset[str] = frozenset()

    def reason_for(self, node: str) -> Reason | None:
        """Return why no action is taken on `node`; None if actions are allowed."""
        return self.everywhere or self.nodes.get(node)


def detect(pool: PoolView, candidates: Sequence[NodeView], policy: NodePolicy) -> StormState:
    """Return the storms in the pool. `candidates` must contain every node with current or recent trouble."""
    troubles = sorted(_troubles(candidates, policy), key=lambda each: (each.ago_s, each.node.name))
    if not troubles:
        return StormState()
    held = _suspects(pool, [each.node for each in troubles if each.is_bad], policy)
    troubles = [each for each in troubles if each.node.name not in held]
    crowds: list[_Trouble] = []
    for rack, here in sorted(_by_rack(troubles).items()):
        crowd = _together(here, policy.rack_nodes, policy)
        crowds += crowd
        # A rack counts as one node of the pool: trouble in many racks is a storm of the pool, but trouble in
        # one rack is not.
        counted = {each.node.name for each in crowd[1:]}
        troubles = [each for each in troubles if each.node.name not in counted]
        storm = _storm(crowd, pool.now_s, policy, f"rack {rack}")
        if storm is not None:
            held.update((each.node.name, storm) for each in here)
    need = max(policy.storm_nodes, int(policy.storm_share * len(pool.nodes)))
    together = _together(troubles, need, policy)
    everywhere = _storm(together, pool.now_s, policy, "the pool")
    return StormState(
        everywhere, held, frozenset(each.node.name for each in (*together, *crowds) if each.is_bad)
    )


def _troubles(candidates: Iterable[NodeView], policy: NodePolicy) -> Iterable[_Trouble]:
    """Yield the nodes that are or recently were unhealthy. Brief trouble of many nodes is a storm too."""
    for node in candidates:
        if node.report is None or node.cordoned or is_unknown(node, policy):
            continue  # someone is working on a cordoned node, so trouble is expected there
        found = evidence.unhealthy(node.report)
        if found:
            yield _Trouble(node.silent_s + max(each.held_s for each in found), node, True)
        # a node that is out may be under repair
        elif node.report.calmed_s < policy.memory_s and not is_out(node):
            yield _Trouble(node.silent_s + node.report.calmed_s, node, False)


def _by_rack(troubles: Sequence[_Trouble]) -> dict[str, list[_Trouble]]:
    found: dict[str, list[_Trouble]] = {}
    for each in troubles:
        if each.node.rack:
            found.setdefault(each.node.rack, []).append(each)
    return found


def _together(troubles: Sequence[_Trouble], need: int, policy: NodePolicy) -> list[_Trouble]:
    """Return the nodes of all windows with at least `need` troubles. `troubles` is sorted, newest first."""
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


def _suspects(pool: PoolView, bad: Sequence[NodeView], policy: NodePolicy) -> dict[str, Reason]:
    """Return the unhealthy nodes whose agents have a version that is not trusted."""
    unhealthy_by_version = Counter(_version(node) for node in bad if _counts(node, policy))
    if not unhealthy_by_version:
        return {}
    stale_s = policy.stale_s
    reporting = Counter(
        node.report.agent for node in pool.nodes if node.report is not None and node.silent_s <= stale_s
    )
    distrusted = {
        version: Reason(
            math.inf,  # the reason lasts until the agents' reports change
            f"{count} of {reporting[version]} agents of version {version or 'unknown'} report unhealthy: "
            f"the version is suspect",
        )
        for version, count in unhealthy_by_version.items()
        if count == reporting[version] or count > max(1, policy.cohort_share * reporting[version])
    }
    return {node.name: distrusted[_version(node)] for node in bad if _version(node) in distrusted}


def _version(node: NodeView) -> str:
    return node.report.agent if node.report is not None else ""


def _counts(node: NodeView, policy: NodePolicy) -> bool:
    """True if the node's report counts for or against its agent's version.

    The report of a node that has been out for a long time does not count.
    """
    if node.report is None or not is_out(node):
        return True
    return min(each.held_s for each in evidence.unhealthy(node.report)) < policy.cohort_s
