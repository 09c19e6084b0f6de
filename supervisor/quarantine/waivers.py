"""Decide what an operator's release of a node still covers. Pure.

An operator who removes the taint knows the findings of that time. Newer evidence is not covered, even if its
key is the same: a finding that began after the release, an event with a sign after it, and a finding that has
outlived another boot of the node. An event that a boot has ended is still reported for some minutes, but no
longer as lasting: it has not outlived the boot. A waiver also ends after `waiver_s`, or a node could serve
with a fault forever.
"""

from __future__ import annotations

from supervisor.quarantine import evidence
from supervisor.quarantine.model import NodeFinding, NodePolicy, NodeView, Waiver


def counted(node: NodeView, now_s: float, policy: NodePolicy) -> tuple[NodeFinding, ...]:
    """Return the unhealthy findings that no waiver covers, worst first, weighed with each other."""
    if node.report is None:
        return ()
    findings = not_waived(node, evidence.unhealthy(node.report), now_s, policy)
    return evidence.weigh(node, evidence.most(findings), now_s)


def counted_or_all(node: NodeView, now_s: float, policy: NodePolicy) -> tuple[NodeFinding, ...]:
    """Return the findings that say when the node fell ill: the counted ones, or all if a waiver covers all.

    An old finding that an operator has waived must not make the new ones look old.
    """
    found = counted(node, now_s, policy)
    if found or node.report is None:
        return found
    return evidence.weigh(node, evidence.most(evidence.unhealthy(node.report)), now_s)


def not_waived(
    node: NodeView, findings: tuple[NodeFinding, ...], now_s: float, policy: NodePolicy
) -> tuple[NodeFinding, ...]:
    """Return the findings that count against the node, because no waiver covers them."""
    waiver = node.waiver
    if waiver is None:
        return findings
    if has_expired(waiver, now_s, policy):
        return findings
    booted, reported_s = _was_booted_since(node, waiver), now_s - node.silent_s
    return tuple(
        each
        for each in findings
        if not _covers(waiver, each, reported_s) or (booted and not _is_ending(each))
    )


def has_expired(waiver: Waiver, now_s: float, policy: NodePolicy) -> bool:
    return now_s >= ends_at_s(waiver, policy)


def ends_at_s(waiver: Waiver, policy: NodePolicy) -> float:
    return waiver.at_s + policy.waiver_s


def _was_booted_since(node: NodeView, waiver: Waiver) -> bool:
    """True if the node is known to have booted since the release."""
    boot_id = node.report.boot_id if node.report is not None else ""
    return bool(waiver.boot_id and boot_id) and waiver.boot_id != boot_id


def _is_ending(finding: NodeFinding) -> bool:
    """True for an event whose remedy was seen, or that needs none. A sample is measured, so it is current."""
    return finding.sign_s is not None and not finding.lasting


def _covers(waiver: Waiver, finding: NodeFinding, reported_s: float) -> bool:
    """True if the operator knew the finding. `reported_s` is the time of the report."""
    if finding.key not in waiver.evidence and finding.place_key not in waiver.evidence:
        return False
    newest_s = finding.held_s if finding.sign_s is None else min(finding.held_s, finding.sign_s)
    return reported_s - newest_s <= waiver.at_s
