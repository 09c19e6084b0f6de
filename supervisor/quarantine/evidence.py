"""Weigh findings by their sensors and their duration, to decide which actions they justify. Pure.

A single sensor can be wrong for any length of time. Its report alone can keep new work off a node, because
this costs little and is easily undone. To end running work, a second witness is required: another sensor or
the verdict of the driver.
"""

from __future__ import annotations

from supervisor.quarantine.model import ACTIONS, MAX_EVIDENCE, UNHEALTHY, NodeFinding, NodePolicy, Report

WITNESSES = 2


def unhealthy(report: Report) -> tuple[NodeFinding, ...]:
    """Return the unhealthy findings, but no more than a node's annotations can hold."""
    return tuple(each for each in report.findings if each.level == UNHEALTHY)[:MAX_EVIDENCE]


def is_corroborated(finding: NodeFinding) -> bool:
    """True if the driver gave the verdict or if two sensors report the finding.

    An operator's override does not count: it defines what a code means, but does not confirm that the code
    occurred.
    """
    return finding.verdict_by == "driver" or len(set(finding.sources)) >= WITNESSES


def confirm_s(finding: NodeFinding, policy: NodePolicy) -> float:
    """Return how long the finding must be reported before it counts."""
    return policy.confirm_s if is_corroborated(finding) else policy.confirm_alone_s


def unconfirmed_s(findings: tuple[NodeFinding, ...], policy: NodePolicy) -> float:
    """Return how many seconds until the first of `findings` is confirmed; 0 or less if one already is.

    The ages refer to the time of the report, so a finding is never confirmed by the first report of it.
    """
    return min(confirm_s(each, policy) - each.held_s for each in findings)


def wants_drain(finding: NodeFinding, policy: NodePolicy) -> bool:
    """True if the finding lasts until it is remedied, and the remedy requires an empty node."""
    return finding.level == UNHEALTHY and finding.lasting and finding.action in policy.drain_for


def may_drain(finding: NodeFinding, policy: NodePolicy) -> bool:
    """True if the finding justifies ending the work that runs on the node."""
    return (
        wants_drain(finding, policy)
        and is_corroborated(finding)
        and finding.held_s >= confirm_s(finding, policy)
    )


def severity(findings: tuple[NodeFinding, ...]) -> tuple[bool, bool, int, float]:
    """Return a sort key that puts the worst node last.

    It compares, in this order, whether a finding is corroborated, whether it lasts until it is remedied, the
    cost of its remedy, and its duration.
    """
    return max(
        (is_corroborated(each), each.lasting, cost_rank(each.action), each.held_s) for each in findings
    )


def cost_rank(action: str) -> int:
    """Return the rank of an action by cost; an unknown action counts as the cheapest."""
    return ACTIONS.index(action) if action in ACTIONS else 0


def costliest_action(findings: tuple[NodeFinding, ...]) -> str:
    """Return the costliest remedy that the findings require."""
    return max((each.action for each in findings), key=cost_rank, default="none")


def keys(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    return tuple(sorted({each.key for each in findings}))


def sources(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    return tuple(sorted({source for each in findings for source in each.sources}))


def describe(findings: tuple[NodeFinding, ...]) -> str:
    """Return one line with the worst finding, the sensors that report it, and the number of others."""
    worst = max(findings, key=lambda each: (severity((each,)), each.key))
    by = "the driver" if worst.verdict_by == "driver" else ", ".join(worst.sources) or "an unnamed sensor"
    more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{worst.key} ({worst.action}) for {worst.held_s:.0f} s, reported by {by}{more}"
