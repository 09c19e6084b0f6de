"""Release nodes that have been healthy for long enough. Pure.

A few nodes cause many of the failures (Meta, arXiv 2410.21680). A node that has failed repeatedly is likely
to fail again, and each failure costs a job more than doing without the node. So the lemon score counts a
node's incidents, and each one doubles how long the node must be healthy.

If a GPU must be replaced, the node returns only once that GPU is gone and another one is in its place:
neither a boot nor time repairs it. An operator who knows better can remove the taint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from supervisor.quarantine import evidence
from supervisor.quarantine.model import (
    Hold,
    NodePolicy,
    NodeView,
    PastQuarantine,
    Quarantine,
    QuarantineAction,
    Release,
    Report,
)

RELAPSE_WEIGHT = 2.0  # a relapse counts as two incidents, because the required healthy period was too short


def waiting(node: NodeView, why: str, age_s: float, limit_s: float, now_s: float) -> Hold:
    """Return a hold that becomes an alert when its cause, which has an age of `age_s`, is `limit_s` old."""
    age_s = max(0.0, age_s)  # a clock that was set back makes nothing younger than now
    if age_s < limit_s:
        return Hold(node.name, why, now_s + limit_s - age_s)
    return Hold(node.name, f"{why}; for {age_s / 3600:.0f} h", alert=True)


def release_quarantined(
    node: NodeView, report: Report, held: Quarantine, now_s: float, policy: NodePolicy
) -> QuarantineAction:
    """Return a release if the node has been healthy for long enough since it was taken out; else a hold."""
    needed_s = required_health_s(node, now_s, policy)
    clean_s = _clean_s(report, held, now_s)
    blind = _blind(report, held)
    if blind:
        why = f"its agent reports no fault, but {', '.join(blind)} cannot measure"
        return waiting(node, why, now_s - held.at_s, policy.alert_s, now_s)
    if held.replace and not is_remedied(node):
        why = f"{', '.join(held.replace)} must be replaced, and no other GPU has been seen in its place"
        return Hold(node.name, f"{why}: replace it, or remove the taint", alert=True)
    if clean_s < needed_s:
        lacks = "" if is_remedied(node) else f", without a sign of the remedy ({held.action})"
        why = f"healthy for {clean_s:.0f} of {needed_s:.0f} s{lacks}"
        return Hold(node.name, why, now_s + needed_s - clean_s)
    score = lemon_score(node.history, now_s, policy)
    return Release(node.name, f"healthy for {clean_s:.0f} s; lemon score {score:.1f}", node.version)


def may_be_traded(node: NodeView, now_s: float, policy: NodePolicy) -> bool:
    """True if the node is out for no other reason than the proof of its health, and has begun it well.

    It may then return early, to make room for a node with a fault.
    """
    report, held = node.report, node.quarantine
    if report is None or held is None or node.cordoned or not node.ready or evidence.unhealthy(report):
        return False
    return (
        not _blind(report, held)
        and is_remedied(node)
        and policy.clean_s <= _clean_s(report, held, now_s) < required_health_s(node, now_s, policy)
    )


def _clean_s(report: Report, held: Quarantine, now_s: float) -> float:
    return min(report.clean_s, max(0.0, now_s - held.at_s))


def _blind(report: Report, held: Quarantine) -> list[str]:
    """Return the sensors that found the fault and cannot measure now."""
    return sorted({*report.blind} & {*held.sources})


def release_avoided(node: NodeView, report: Report, now_s: float, policy: NodePolicy) -> QuarantineAction:
    """Return a release if the taint, which only makes work prefer other nodes, is obsolete; else a hold."""
    if not policy.prefer_away:
        return Release(node.name, "degraded nodes are no longer avoided", node.version)
    if report.findings:
        age_s = evidence.age_s(node, report.findings)
        why = f"avoided: {evidence.describe(report.findings)}"
        return waiting(node, why, age_s, policy.repair_s, now_s)
    if report.quiet_s < policy.clean_s:
        until_s = now_s + policy.clean_s - report.quiet_s
        return Hold(node.name, f"healthy for {report.quiet_s:.0f} of {policy.clean_s:.0f} s", until_s)
    return Release(node.name, f"healthy for {report.quiet_s:.0f} s", node.version)


def lemon_score(history: Sequence[PastQuarantine], now_s: float, policy: NodePolicy) -> float:
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
    """True unless the remedy includes a reboot or another GPU, and none was seen.

    A fault that ended without its remedy is likely to recur.
    """
    held, report = node.quarantine, node.report
    if held is None or report is None:
        return True
    if held.replace:
        # As many GPUs as before, none of them bad: the slot of a bad one must not just be empty.
        return len(report.devices) >= held.gpus and not {*held.replace} & {*report.devices}
    if held.action == "replace":
        return False  # nothing shows that an unknown device was replaced
    return held.action != "reboot_node" or held.boot_id != report.boot_id
