"""Has a node that we keep work off proved its health? Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from supervisor.quarantine import evidence
from supervisor.quarantine.model import (
    Action,
    Hold,
    Incident,
    NodePolicy,
    NodeView,
    Quarantine,
    Release,
    Report,
)


def release_quarantined(
    node: NodeView, report: Report, held: Quarantine, now_s: float, policy: NodePolicy
) -> Action:
    """Let the node back once it has been well for long enough since we took it out."""
    needed_s = required_health_s(node, now_s, policy)
    clean_s = min(report.clean_s, max(0.0, now_s - held.at_s))
    blind = sorted({*report.blind} & {*held.sources})
    if blind:
        return Hold(node.name, f"says that it is well, but {', '.join(blind)} cannot see")
    if clean_s < needed_s:
        lacks = "" if is_remedied(node) else f", {held.action} not having been seen"
        why = f"well for {clean_s:.0f} of {needed_s:.0f} s{lacks}"
        return Hold(node.name, why, now_s + needed_s - clean_s)
    score = lemon_score(node.history, now_s, policy)
    return Release(node.name, f"well for {clean_s:.0f} s; lemon score {score:.1f}", node.version)


def release_avoided(node: NodeView, report: Report, now_s: float, policy: NodePolicy) -> Action:
    """Take the weak taint off again."""
    if not policy.prefer_away:
        return Release(node.name, "degraded nodes are no longer avoided", node.version)
    if report.findings:
        return Hold(node.name, f"avoided: {evidence.describe(report.findings)}")
    if report.quiet_s < policy.clean_s:
        until_s = now_s + policy.clean_s - report.quiet_s
        return Hold(node.name, f"well for {report.quiet_s:.0f} of {policy.clean_s:.0f} s", until_s)
    return Release(node.name, f"well for {report.quiet_s:.0f} s", node.version)


# How long a node must have been well before it comes back: longer, the oftener it was out. Pure.
#
# Meta found that a few nodes cause many of the failures (arXiv 2410.21680): a node that has failed again and
# again will fail again, and each time it costs a job more than its absence does.


NEEDS_BOOT = ("reboot_node", "replace")  # a new boot id shows that it was done
RELAPSE_WEIGHT = 2.0  # the proof of health was not enough the last time


def lemon_score(history: Sequence[Incident], now_s: float, policy: NodePolicy) -> float:
    """Return the number of incidents, each worth half after each half-life. One just now is worth 1."""
    return sum(
        (RELAPSE_WEIGHT if each.relapse else 1.0)
        * math.pow(0.5, max(0.0, now_s - each.at_s) / policy.half_life_s)  # a clock set back adds nothing
        for each in history
    )


def required_health_s(node: NodeView, now_s: float, policy: NodePolicy) -> float:
    """Return how long a node must have been clean: it doubles with each incident, up to `max_clean_s`."""
    doublings = min(32.0, max(0.0, lemon_score(node.history, now_s, policy) - 1.0))
    needed_s = policy.clean_s * math.pow(2.0, doublings)
    if node.quarantine is not None and not is_remedied(node):
        needed_s *= policy.unremedied
    return min(needed_s, policy.max_clean_s)


def is_remedied(node: NodeView) -> bool:
    """False when the node should have been booted anew and was not: what went by itself comes by itself."""
    held = node.quarantine
    if held is None or node.report is None or held.action not in NEEDS_BOOT:
        return True
    return held.boot_id != node.report.boot_id
