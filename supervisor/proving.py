"""Has a node that we keep work off proved its health? Pure."""

from __future__ import annotations

from supervisor import lemon, witness
from supervisor.nodepolicy import NodePolicy
from supervisor.nodes import Action, Hold, NodeView, Quarantine, Release, Report


def taken_out(node: NodeView, report: Report, held: Quarantine, now_s: float, policy: NodePolicy) -> Action:
    """Let the node back once it has been well for long enough since we took it out."""
    needed_s = lemon.proof_s(node, now_s, policy)
    clean_s = min(report.clean_s, max(0.0, now_s - held.at_s))
    blind = sorted({*report.blind} & {*held.sources})
    if blind:
        return Hold(node.name, f"says that it is well, but {', '.join(blind)} cannot see")
    if clean_s < needed_s:
        lacks = "" if lemon.is_remedied(node) else f", {held.action} not having been seen"
        why = f"well for {clean_s:.0f} of {needed_s:.0f} s{lacks}"
        return Hold(node.name, why, now_s + needed_s - clean_s)
    score = lemon.score(node.history, now_s, policy)
    return Release(node.name, f"well for {clean_s:.0f} s; lemon score {score:.1f}", node.version)


def avoided(node: NodeView, report: Report, now_s: float, policy: NodePolicy) -> Action:
    """Take the weak taint off again."""
    if not policy.prefer_away:
        return Release(node.name, "degraded nodes are no longer avoided", node.version)
    if report.findings:
        return Hold(node.name, f"avoided: {witness.told(report.findings)}")
    if report.quiet_s < policy.clean_s:
        until_s = now_s + policy.clean_s - report.quiet_s
        return Hold(node.name, f"well for {report.quiet_s:.0f} of {policy.clean_s:.0f} s", until_s)
    return Release(node.name, f"well for {report.quiet_s:.0f} s", node.version)
