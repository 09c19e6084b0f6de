"""What a finding is worth: who saw it, for how long, and what may follow from it. Pure.

One sensor may be wrong for as long as it likes. So its word alone keeps new work off a node, which costs
little and is undone in a moment, and never ends work that runs. That takes a second witness: another sensor,
or the driver's own verdict.
"""

from __future__ import annotations

from supervisor.quarantine.model import ACTIONS, MAX_EVIDENCE, UNHEALTHY, NodeFinding, NodePolicy, Report

WITNESSES = 2


def unhealthy(report: Report) -> tuple[NodeFinding, ...]:
    """Return what may cost the node its work, as much of it as a node can remember."""
    return tuple(each for each in report.findings if each.level == UNHEALTHY)[:MAX_EVIDENCE]


def is_corroborated(finding: NodeFinding) -> bool:
    """An operator's override is about what a code means, not about who saw it: it is no witness."""
    return finding.said_by == "driver" or len(set(finding.sources)) >= WITNESSES


def confirm_s(finding: NodeFinding, policy: NodePolicy) -> float:
    return policy.confirm_s if is_corroborated(finding) else policy.confirm_alone_s


def unconfirmed_s(findings: tuple[NodeFinding, ...], policy: NodePolicy) -> float:
    """Return for how long the first of them still has to hold; 0 or less when one has held long enough.

    The age is that of the report: the one that confirms is a later one than that which first said so.
    """
    return min(confirm_s(each, policy) - each.held_s for each in findings)


def wants_drain(finding: NodeFinding, policy: NodePolicy) -> bool:
    """True when the node must be empty for what is to be done. What ends by itself needs nothing done."""
    return finding.level == UNHEALTHY and finding.lasting and finding.action in policy.drain_for


def may_drain(finding: NodeFinding, policy: NodePolicy) -> bool:
    return (
        wants_drain(finding, policy)
        and is_corroborated(finding)
        and finding.held_s >= confirm_s(finding, policy)
    )


def severity(findings: tuple[NodeFinding, ...]) -> tuple[bool, bool, int, float]:
    """Return what sorts bad nodes, the worst last: sure and lasting before dear, dear before old."""
    return max(
        (is_corroborated(each), each.lasting, cost_rank(each.action), each.held_s) for each in findings
    )


def cost_rank(action: str) -> int:
    """Return the place of an action, the dearest last; a word that we do not know is the cheapest."""
    return ACTIONS.index(action) if action in ACTIONS else 0


def costliest_action(findings: tuple[NodeFinding, ...]) -> str:
    return max((each.action for each in findings), key=cost_rank, default="none")


def keys(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    return tuple(sorted({each.key for each in findings}))


def sources(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    return tuple(sorted({source for each in findings for source in each.sources}))


def describe(found: tuple[NodeFinding, ...]) -> str:
    """Say what has been found, the worst first."""
    worst = max(found, key=lambda each: (severity((each,)), each.key))
    by = "the driver" if worst.said_by == "driver" else ", ".join(worst.sources) or "nobody named"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{worst.key} ({worst.action}) for {worst.held_s:.0f} s, says {by}{more}"
