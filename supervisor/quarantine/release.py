"""Release nodes that have been healthy for long enough. Pure.

A few nodes cause many of the failures (Meta, arXiv 2410.21680). A node that has failed repeatedly is likely
to fail again, and each failure costs a job more than the absence of the node does. The lemon score therefore
counts a node's incidents, and each incident doubles how long the node must be healthy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from supervisor.quarantine import evidence
from supervisor.quarantine.model import (
    Hold,
    Incident,
    NodePolicy,
    NodeView,
    Quarantine,
    QuarantineAction,
    Release,
    Report,
)

NEEDS_BOOT = ("reboot_node", "replace")  # a new boot id shows that this remedy was carried out
RELAPSE_WEIGHT = 2.0  # a relapse counts as two incidents, because the required healthy period was too short


def release_quarantined(
    node: NodeView, report: Report, held: Quarantine, now_s: float, policy: NodePolicy
) -> QuarantineAction:
    """Return a release if the node has been healthy for long enough since it was taken out; else a hold."""
    needed_s = required_health_s(node, now_s, policy)
    clean_s = min(report.clean_s, max(0.0, now_s - held.at_s))
    blind = sorted({*report.blind} & {*held.sources})
    if blind:
        return Hold(node.name, f"its agent reports no fault, but {', '.join(blind)} cannot measure")
    if clean_s < needed_s:
        lacks = "" if is_remedied(node) else f", without a sign of the remedy ({held.action})"
        why = f"healthy for {clean_s:.0f} of {needed_s:.0f} s{lacks}"
        return Hold(node.name, why, now_s + needed_s - clean_s)
    score = lemon_score(node.history, now_s, policy)
    return Release(node.name, f"healthy for {clean_s:.0f} s; lemon score {score:.1f}", node.version)


def release_avoided(node: NodeView, report: Report, now_s: float, policy: NodePolicy) -> QuarantineAction:
    """Return a release if the taint, which only makes work prefer other nodes, is obsolete; else a hold."""
    if not policy.prefer_away:
        return Release(node.name, "degraded nodes are no longer avoided", node.version)
    if report.findings:
        return Hold(node.name, f"avoided: {evidence.describe(report.findings)}")
    if report.quiet_s < policy.clean_s:
        until_s = now_s + policy.clean_s - report.quiet_s
        return Hold(node.name, f"healthy for {report.quiet_s:.0f} of {policy.clean_s:.0f} s", until_s)
    return Release(node.name, f"healthy for {report.quiet_s:.0f} s", node.version)


def lemon_score(history: Sequence[Incident], now_s: float, policy: NodePolicy) -> float:
    """Return the sum of the incidents, each weighted by 0.5 to the power of its age in half-lives."""
    return sum(
        (RELAPSE_WEIGHT if each.relapse else 1.0)
        * math.pow(0.5, max(0.0, now_s - each.at_s) / policy.half_life_s)  # a clock set back adds no weight
        for each in history
    )


def required_health_s(node: NodeView, now_s: float, policy: NodePolicy) -> float:
    """Return how long a node must have been healthy. Each incident doubles the time, up to `max_clean_s`."""
    doublings = min(32.0, max(0.0, lemon_score(node.history, now_s, policy) - 1.0))
    needed_s = policy.clean_s * math.pow(2.0, doublings)
    if node.quarantine is not None and not is_remedied(node):
        needed_s *= policy.unremedied
    return min(needed_s, policy.max_clean_s)


def is_remedied(node: NodeView) -> bool:
    """True unless the remedy includes a reboot and none was seen.

    A fault that ended without its remedy is likely to recur.
    """
    held = node.quarantine
    if held is None or node.report is None or held.action not in NEEDS_BOOT:
        return True
    return held.boot_id != node.report.boot_id
