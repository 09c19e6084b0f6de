"""Weigh findings by their witnesses and their duration, to decide which actions they justify. Pure.

A single sensor can be wrong for any length of time. Its report alone can keep new work off a node, because
that costs little and is easily undone. Ending work in progress takes a second witness: evidence of another
origin, or the driver's verdict. Two sensors that read the same log or the same counters share an origin, so
they are one witness. A training run that saw the fault is a witness too.

One fault often appears as several findings: NVML reports a GPU as lost, and the kernel log has an Xid of the
same GPU. Such findings back each other if one needs at least the other's remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast import node_report
from holdfast.node_report import DRIVER, UNHEALTHY, cost_rank
from supervisor.quarantine.model import MAX_EVIDENCE, NodeFinding, NodePolicy, NodeView, Report

RUN = "run"  # the origin of a fault that a training run saw
DRIVERS_WORD = "the driver's verdict"
RUN_WINDOW_S = 600.0  # a job often dies minutes before or after the first sign of its GPU's fault
# A fault that comes and goes is confirmed when it has recently been present for this many times as long as
# one that persists. For a single witness, that is half of an hour.
FLAPS = 6.0
# A node that has been unhealthy for so long within about a day, on many occasions, needs an operator.
UNSTEADY_S = 3600.0
# The parts of a node that contain all of its GPUs. A fault in one of them backs the reboot that a GPU needs.
WHOLE_NODE = ("node", "driver", "sensor")


def unhealthy(report: Report) -> tuple[NodeFinding, ...]:
    """Return all unhealthy findings, worst first. Only `most` may shorten the list, after all filters."""
    return tuple(each for each in report.findings if each.level == UNHEALTHY)


def most(findings: tuple[NodeFinding, ...]) -> tuple[NodeFinding, ...]:
    """Return the first findings, up to the number that is weighed and that a node's annotations can hold."""
    return findings[:MAX_EVIDENCE]


def weigh(node: NodeView, findings: tuple[NodeFinding, ...], now_s: float) -> tuple[NodeFinding, ...]:
    """Return the findings, each with the origins of other evidence for its remedy in `backing`.

    `findings` must not contain findings that an operator has waived, because these back no other findings.
    """
    if len(findings) < 2 and not node.runs:
        return findings
    return tuple(replace(each, backing=_backing(node, each, findings, now_s)) for each in findings)


def _backing(
    node: NodeView, finding: NodeFinding, findings: Sequence[NodeFinding], now_s: float
) -> tuple[str, ...]:
    origins: set[str] = set()
    for other in findings:
        if other is not finding and _backs(other, finding):
            origins |= {*origins_of(other), *((DRIVERS_WORD,) if other.verdict_by == DRIVER else ())}
    if _seen_by_a_run(node, finding, now_s):
        origins.add(RUN)
    return tuple(sorted(origins))


def _backs(other: NodeFinding, finding: NodeFinding) -> bool:
    """True if `other` is evidence that the object of `finding` needs at least the remedy of `finding`."""
    if not (finding.entity and other.entity):
        return False
    if not finding.remedy or cost_rank(other.remedy) < cost_rank(finding.remedy):
        return False
    if (finding.device or finding.entity) == (other.device or other.entity):
        return True
    both = (_kind(finding), _kind(other))
    return finding.remedy == other.remedy == "reboot_node" and any(each in WHOLE_NODE for each in both)


def _seen_by_a_run(node: NodeView, finding: NodeFinding, now_s: float) -> bool:
    """True if a run saw a fault of the same GPU or node shortly before the finding began, or since then."""
    began_s = now_s - node.silent_s - finding.held_s
    return any(
        began_s - RUN_WINDOW_S <= each.at_s <= now_s
        and (
            each.device == finding.device
            if each.device and finding.device
            else _kind(finding) in ("gpu", *WHOLE_NODE)
        )
        for each in node.runs
    )


def _kind(finding: NodeFinding) -> str:
    return finding.entity.partition("/")[0]


def origins_of(finding: NodeFinding) -> tuple[str, ...]:
    """Return the finding's origins. An older agent reports none, so each sensor counts as an origin."""
    return finding.origins or finding.sources


def is_corroborated(finding: NodeFinding) -> bool:
    """True if the driver gave the verdict or if there are two witnesses.

    An operator's override does not count: it defines what a code means, but does not confirm it.
    """
    origins = (*origins_of(finding), *finding.backing)
    return DRIVERS_WORD in finding.backing or node_report.is_corroborated(finding.verdict_by, origins)


def is_sure(finding: NodeFinding) -> bool:
    """True if the finding is corroborated and only a remedy can end it."""
    return finding.level == UNHEALTHY and finding.lasting and is_corroborated(finding)


def confirm_s(finding: NodeFinding, policy: NodePolicy) -> float:
    """Return how long the finding must be reported before it counts."""
    return policy.confirm_s if is_corroborated(finding) else policy.confirm_alone_s


def _left_s(finding: NodeFinding, policy: NodePolicy) -> float:
    """Return how many seconds until the finding is confirmed; 0 or less if it is."""
    needed_s = confirm_s(finding, policy)
    if finding.recent_s >= FLAPS * needed_s:
        return 0.0
    return needed_s - finding.held_s


def unconfirmed_s(findings: tuple[NodeFinding, ...], policy: NodePolicy) -> float:
    """Return how many seconds until the first of `findings` is confirmed; 0 or less if one already is.

    The ages refer to the time of the report, so a finding is never confirmed by its first report.
    """
    return min(_left_s(each, policy) for each in findings)


def confirmed(findings: tuple[NodeFinding, ...], policy: NodePolicy) -> tuple[NodeFinding, ...]:
    return tuple(each for each in findings if unconfirmed_s((each,), policy) <= 0)


def age_s(node: NodeView, findings: Sequence[NodeFinding]) -> float:
    """Return the current age of the oldest of `findings`, including the time since the report."""
    return node.silent_s + max(each.held_s for each in findings)


def wants_drain(finding: NodeFinding, policy: NodePolicy) -> bool:
    """True if the finding lasts until it is remedied, and the remedy requires an empty node."""
    wanted = {finding.action, finding.remedy} & policy.drain_for
    return finding.level == UNHEALTHY and finding.lasting and bool(wanted)


def may_drain(finding: NodeFinding, policy: NodePolicy) -> bool:
    """True if the finding justifies ending the work that runs on the node."""
    return wants_drain(finding, policy) and is_corroborated(finding) and _left_s(finding, policy) <= 0


def severity(findings: tuple[NodeFinding, ...]) -> tuple[bool, bool, int, float]:
    """Return a sort key that puts the worst node last.

    It compares, in this order, whether a finding is corroborated, whether it lasts until it is remedied, the
    cost of its remedy, and its duration.
    """
    return max((*_severity(each), each.held_s) for each in findings)


def _severity(finding: NodeFinding) -> tuple[bool, bool, int]:
    return node_report.severity(
        is_corroborated=is_corroborated(finding),
        is_lasting=finding.lasting,
        action=finding.remedy or finding.action,
    )


def costliest_action(findings: tuple[NodeFinding, ...]) -> str:
    """Return the costliest remedy that the findings require."""
    return max((each.action for each in findings), key=cost_rank, default="none")


def to_replace(findings: tuple[NodeFinding, ...], report: Report) -> tuple[str, ...]:
    """Return the known GPUs that must be replaced according to the findings.

    For some minutes after the replacement, a finding is still reported, but it is no longer lasting and its
    GPU is gone.
    """
    wanted = [each for each in findings if each.remedy == "replace" and each.device]
    return tuple(sorted({each.device for each in wanted if each.lasting or each.device in report.devices}))


def keys(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    return tuple(sorted({each.key for each in findings}))


def remedies(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    """Return "REMEDY KEY" for each finding whose key does not end with its remedy, sorted."""
    unnamed = (each for each in findings if each.remedy and each.remedy != each.action)
    return tuple(sorted({f"{each.remedy} {each.key}" for each in unnamed}))


def sources(findings: tuple[NodeFinding, ...]) -> tuple[str, ...]:
    return tuple(sorted({source for each in findings for source in each.sources}))


def describe(findings: tuple[NodeFinding, ...]) -> str:
    """Return one line with the worst finding, its witnesses, and the number of other findings."""
    worst = max(findings, key=lambda each: (severity((each,)), each.key))
    by = "the driver" if worst.verdict_by == DRIVER else ", ".join(worst.sources) or "an unnamed sensor"
    other = ", ".join(each for each in worst.backing if each not in origins_of(worst))
    backed = f", backed by {other}" if other else ""
    flaps = f", recently present for {worst.recent_s:.0f} s" if worst.recent_s else ""
    more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{worst.key} ({worst.action}) for {worst.held_s:.0f} s{flaps}, reported by {by}{backed}{more}"
