"""Decide what an operator's release of a node still covers. Pure.

An operator who removes the taint knows the findings of that time. Newer evidence is not covered, even if its
key is the same. This includes findings that began after the release, events and counter growth with a sign
after the release, and findings that have outlived another boot of the node. A finding that a boot has ended
is still reported for some minutes. It has not outlived the boot, because it is no longer lasting and no
sample has shown it since. A waiver also ends after `waiver_s`, because otherwise a node could serve with a
fault forever.
"""

from __future__ import annotations

from supervisor.quarantine import evidence
from supervisor.quarantine.model import NodeFinding, NodePolicy, NodeView, Waiver


def counted(node: NodeView, now_s: float, policy: NodePolicy) -> tuple[NodeFinding, ...]:
    """Return the unhealthy findings that no waiver covers, worst first, after `evidence.weigh`."""
    if node.report is None:
        return ()
    findings = not_waived(node, evidence.unhealthy(node.report), now_s, policy)
    return evidence.weigh(node, evidence.most(findings), now_s)


def counted_or_all(node: NodeView, now_s: float, policy: NodePolicy) -> tuple[NodeFinding, ...]:
    """Return the findings that show when the node became unhealthy.

    These are the findings that no waiver covers, or all findings if waivers cover all of them. An old finding
    that an operator has waived must not make the new ones look old.
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
    """True if the finding is no longer being measured, and its remedy was either seen or not needed.

    It is an event, or no sample has shown it since the boot.
    """
    return not finding.lasting and (finding.sign_s is not None or finding.is_from_before_boot)


def _covers(waiver: Waiver, finding: NodeFinding, reported_s: float) -> bool:
    """True if the operator knew about the finding. `reported_s` is the time of the report."""
    if finding.key not in waiver.evidence and finding.place_key not in waiver.evidence:
        return False
    newest_s = finding.held_s if finding.sign_s is None else min(finding.held_s, finding.sign_s)
    return reported_s - newest_s <= waiver.at_s
