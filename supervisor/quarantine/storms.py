"""Do many nodes turn bad together? Then the fault is not theirs, and taking them out does not help. Pure.

Each sign is read from what stands now, so that a restart forgets nothing:

- Many nodes of the pool, or some of one rack, had trouble within a short window: a switch, a file system,
  a driver's roll-out. Nothing more is done there until no new one has come for the time of the cool-down.
  Those that are still bad then are taken out only if there is room for all of them: a fault that so many
  share wants a person.
- Too large a part of the agents of one version say "unhealthy": the version is not believed. Nor is an agent
  when no other of its version is well: that is how the canary of a bad roll-out looks.
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
    """Why nothing is done, and when to look again."""

    until_s: float
    why: str


class _Trouble(NamedTuple):
    """A node that turned bad so long ago, or was bad until then."""

    ago_s: float
    node: NodeView
    is_bad: bool


@dataclass(frozen=True, slots=True)
class StormState:
    """`everywhere` holds for all nodes, `nodes` for those named.

    `crowd` are the bad ones that turned bad together with many others: they go out all, or none of them.
    """

    everywhere: Reason | None = None
    nodes: Mapping[str, Reason] = field(default_factory=dict)
    crowd: frozenset[str] = frozenset()

    def about(self, node: str) -> Reason | None:
        return self.everywhere or self.nodes.get(node)


def detect(pool: PoolView, odd: Sequence[NodeView], policy: NodePolicy) -> StormState:
    """Return what is going on. `odd` must have every node with a finding, or with trouble of late."""
    troubles = sorted(_troubles(odd, policy), key=lambda each: (each.ago_s, each.node.name))
    if not troubles:
        return StormState()
    held = _suspects(pool, [each.node for each in troubles if each.is_bad], policy)
    troubles = [each for each in troubles if each.node.name not in held]
    crowds: list[_Trouble] = []
    for rack, here in sorted(_by_rack(troubles).items()):
        there = _together(here, policy.rack_nodes, policy)
        crowds += there
        # For the pool a rack is one trouble: a storm of racks is one of the pool, one rack is not.
        spoken_for = {each.node.name for each in there[1:]}
        troubles = [each for each in troubles if each.node.name not in spoken_for]
        storm = _storm(there, pool.now_s, policy, f"rack {rack}")
        if storm is not None:
            held.update((each.node.name, storm) for each in here)
    need = max(policy.storm_nodes, int(policy.storm_share * len(pool.nodes)))
    together = _together(troubles, need, policy)
    everywhere = _storm(together, pool.now_s, policy, "the pool")
    return StormState(
        everywhere, held, frozenset(each.node.name for each in (*together, *crowds) if each.is_bad)
    )


def _troubles(odd: Iterable[NodeView], policy: NodePolicy) -> Iterable[_Trouble]:
    """Find who is bad, and who was until lately: short blips of many nodes are a storm as well."""
    for node in odd:
        if node.report is None or node.cordoned or is_unknown(node, policy):
            continue  # whoever has cordoned a node works there, and trouble is to be expected
        found = evidence.unhealthy(node.report)
        if found:
            yield _Trouble(node.silent_s + max(each.held_s for each in found), node, True)
        elif node.report.calmed_s < policy.memory_s and not is_out(node):  # one that is out may be repaired
            yield _Trouble(node.silent_s + node.report.calmed_s, node, False)


def _by_rack(troubles: Sequence[_Trouble]) -> dict[str, list[_Trouble]]:
    found: dict[str, list[_Trouble]] = {}
    for each in troubles:
        if each.node.rack:
            found.setdefault(each.node.rack, []).append(each)
    return found


def _together(troubles: Sequence[_Trouble], need: int, policy: NodePolicy) -> list[_Trouble]:
    """Return those of which `need` began within one window. `troubles` are sorted, newest first."""
    found: dict[str, _Trouble] = {}
    for first, last in zip(range(len(troubles)), range(need - 1, len(troubles)), strict=False):
        if troubles[last].ago_s - troubles[first].ago_s <= policy.storm_window_s:
            found.update((each.node.name, each) for each in troubles[first : last + 1])
    return list(found.values())


def _storm(together: Sequence[_Trouble], now_s: float, policy: NodePolicy, where: str) -> Reason | None:
    newest_s = min((each.ago_s for each in together), default=policy.cooldown_s)
    if newest_s >= policy.cooldown_s:
        return None
    count = f"{len(together)} nodes of {where} had trouble within {policy.storm_window_s:.0f} s of another"
    return Reason(now_s + policy.cooldown_s - newest_s, f"a storm: {count}")


def _suspects(pool: PoolView, bad: Sequence[NodeView], policy: NodePolicy) -> dict[str, Reason]:
    """Return the bad nodes whose agents' version is not believed."""
    says_bad = Counter(_version(node) for node in bad if _counts(node, policy))
    if not says_bad:
        return {}
    stale_s = policy.stale_s
    known = [node.report.agent for node in pool.nodes if node.report is not None and node.silent_s <= stale_s]
    heard = Counter(known)
    distrusted = {
        version: Reason(
            math.inf,  # until the agents say something else
            f"{count} of {heard[version]} agents of version {version or 'unknown'} say unhealthy: "
            f"the version is suspect",
        )
        for version, count in says_bad.items()
        if count == heard[version] or count > max(1, policy.cohort_share * heard[version])
    }
    return {node.name: distrusted[_version(node)] for node in bad if _version(node) in distrusted}


def _version(node: NodeView) -> str:
    return node.report.agent if node.report is not None else ""


def _counts(node: NodeView, policy: NodePolicy) -> bool:
    """A node that waits for its repair for days says nothing about agents any more."""
    if node.report is None or not is_out(node):
        return True
    return min(each.held_s for each in evidence.unhealthy(node.report)) < policy.cohort_s
