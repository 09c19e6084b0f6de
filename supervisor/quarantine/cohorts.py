"""Detect versions of the agent whose reports are suspect. Pure.

The agents of one version of the code form a cohort. The operator's policy is not part of the version, because
a node with its own policy would then be its own cohort. A cohort matters in two cases:

- It is large, and many of its agents report "unhealthy". This is an alert, because an operator has to find
  out why.
- It is small, and newer than the most common other version, so it may be the start of a bad roll-out. Actions
  on its nodes are postponed for up to `cohort_s` after the fault, so that an operator can stop the roll-out.

A small cohort of an older version proves nothing about the version, because broken nodes are often the last
ones on an old version.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from supervisor.quarantine import evidence, waivers
from supervisor.quarantine.breaker import is_out
from supervisor.quarantine.model import NodePolicy, NodeView, PoolView

_RELEASE = re.compile(r"\d+(\.\d+)*")


class Reason(NamedTuple):
    """The reason why no action is taken, and when to decide again."""

    until_s: float
    why: str
    alert: bool = False


def suspects(pool: PoolView, bad: Sequence[NodeView], policy: NodePolicy) -> dict[str, Reason]:
    """Return the unhealthy nodes whose agents have a version that is not trusted."""
    unhealthy = Counter(_version(node) for node in bad if _counts(node, pool.now_s, policy))
    if not unhealthy:
        return {}
    stale_s = policy.stale_s
    reporting = Counter(
        node.report.agent for node in pool.nodes if node.report is not None and node.silent_s <= stale_s
    )
    distrusted = {
        version: f"{count} of {reporting[version]} agents of version {version or 'unknown'} report unhealthy:"
        " the version is suspect"
        for version, count in unhealthy.items()
        if (count == reporting[version] or count > max(1, policy.cohort_share * reporting[version]))
        and (reporting[version] >= policy.cohort_nodes or _is_rolled_out_now(version, reporting))
    }
    found: dict[str, Reason] = {}
    for node in bad:
        version = _version(node)
        if version not in distrusted:
            continue
        if reporting[version] >= policy.cohort_nodes:
            found[node.name] = Reason(math.inf, distrusted[version], alert=True)
        elif (left_s := policy.cohort_s - _age_s(node, pool.now_s, policy)) > 0:
            found[node.name] = Reason(pool.now_s + left_s, distrusted[version])
    return found


def _is_rolled_out_now(version: str, reporting: Counter[str]) -> bool:
    """True if there are agents of other versions, and the most common of these is not newer."""
    others = [each for each in reporting if each != version]
    if not others:
        return False
    mine, theirs = _release(version), _release(max(others, key=lambda each: (reporting[each], each)))
    return mine is None or theirs is None or mine >= theirs


def _release(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a version such as `0.2.0`; None for any other text."""
    return tuple(map(int, version.split("."))) if _RELEASE.fullmatch(version) else None


def _version(node: NodeView) -> str:
    return node.report.agent if node.report is not None else ""


def _age_s(node: NodeView, now_s: float, policy: NodePolicy) -> float:
    return evidence.age_s(node, waivers.counted_or_all(node, now_s, policy))


def _counts(node: NodeView, now_s: float, policy: NodePolicy) -> bool:
    """True if the node's report counts for or against its agent's version.

    The report of a node that has long been out with the same fault does not count, no matter what else its
    agent has found since.
    """
    return not is_out(node) or _age_s(node, now_s, policy) < policy.cohort_s
