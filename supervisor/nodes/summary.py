"""Describe the nodes to operators, from the Node objects alone. Pure.

The description is computed in the same way as the supervisor's decisions, so it is available even while no
supervisor runs. One thing differs: a report's age is taken from its timestamp, because a command does not
watch the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.node_report import DEGRADED
from supervisor.nodes.node_objects import KnownNode, parsed_report
from supervisor.nodes.plan import NodePlan, plan
from supervisor.nodes.settings import QuarantineSettings
from supervisor.quarantine import breaker, evidence, release, reports, waivers
from supervisor.quarantine.model import (
    OPERATOR,
    Drain,
    NodePolicy,
    NodeView,
    Release,
    Taint,
)
from supervisor.quarantine.reports import Machine, Received

SCHEMA = 1
STATES = ("quarantined", "held", "suspect", "unknown", "waived", "degraded", "healthy")


@dataclass(frozen=True, slots=True)
class NodePool:
    """The nodes of a cluster, as the quarantine sees them now."""

    nodes: Mapping[str, KnownNode]
    views: Mapping[str, NodeView]
    plan: NodePlan
    settings: QuarantineSettings
    now_s: float

    @property
    def breaker_line(self) -> str:
        """How many nodes are out, and how many may be."""
        state = self.plan.breaker
        unknown = f", {state.unknown} unknown" if state.unknown else ""
        full = "; the breaker is open: no other node is taken out" if not state.room else ""
        return f"{state.out} of {state.total} nodes are out{unknown}; at most {state.allowed} may be{full}"


def pool_of(found: Iterable[tuple[KnownNode, float]], settings: QuarantineSettings, now_s: float) -> NodePool:
    """Return the pool. Each node comes with the age of its report; infinite if it is unknown."""
    nodes: dict[str, KnownNode] = {}
    views: dict[str, NodeView] = {}
    for node, age_s in found:
        if node.is_ours:
            nodes[node.name] = node
            # Show what a drain would do, even on an idle node.
            views[node.name] = replace(_with_report(node, age_s, settings.policy), busy=True)
    planned = plan(nodes, views, {}, settings.policy, now_s, is_dry=True)
    return NodePool(nodes, {each.name: each for each in planned.pool.nodes}, planned, settings, now_s)


def _with_report(node: KnownNode, age_s: float, policy: NodePolicy) -> NodeView:
    view = node.view
    if node.report is None or view.refused or not math.isfinite(age_s):
        return view
    try:
        raw = parsed_report(node.report)
    except ValueError as error:
        return replace(view, refused=f"its report is invalid: {error}")
    machine = Machine(node.boot_id, node.machine_id)
    received = Received(node.name, raw, 0.0)
    return reports.heard(view, machine, (received,), max(0.0, age_s), policy)


def state_of(pool: NodePool, name: str) -> str:
    """Return one of `STATES`."""
    node, policy = pool.views[name], pool.settings.policy
    if breaker.is_tainted(node):
        return "quarantined"
    if node.report is None or breaker.is_unknown(node, policy):
        return "unknown"
    bad = evidence.unhealthy(node.report)
    if bad:
        counted = waivers.counted(node, pool.now_s, policy)
        if not counted:
            return "waived"
        return "suspect" if evidence.unconfirmed_s(counted, policy) > 0 else "held"
    return "degraded" if any(each.level == DEGRADED for each in node.report.findings) else "healthy"


def row_of(pool: NodePool, name: str) -> dict[str, Any]:
    """Return a node as `holdfast nodes -o json` lists it."""
    node, view = pool.nodes[name], pool.views[name]
    held, action = view.quarantine, _action_of(pool, name)
    holds = sorted((each for each in pool.plan.holds if each.node == name), key=lambda each: not each.alert)
    hold = holds[0] if holds else None
    worst = view.report.findings[0] if view.report is not None and view.report.findings else None
    since_s = held.at_s if held is not None else _since_s(view, pool.now_s)
    return {
        "schema": SCHEMA,
        "name": name,
        "state": state_of(pool, name),
        "since": since_s,
        "finding": worst.key if worst is not None else None,
        "wanted": worst.action if worst is not None else (held.action if held is not None else None),
        "next": action,
        "why": hold.why if hold is not None else node.last_decision.get("why") if held is not None else None,
        "alert": hold is not None and hold.alert,
        "until": hold.until_s if hold is not None and math.isfinite(hold.until_s) else None,
        "by": node.last_decision.get("by") if held is not None else None,
        "draining": held is not None and held.drain_at_s is not None,
        "cordoned": view.cordoned,
        "ready": view.ready,
        "request": node.request.kind or node.request.refused if node.request is not None else None,
        "lemon_score": round(release.lemon_score(view.history, pool.now_s, pool.settings.policy), 2),
    }


def _since_s(view: NodeView, now_s: float) -> float | None:
    if view.report is None or not view.report.findings or not math.isfinite(view.silent_s):
        return None
    return now_s - evidence.age_s(view, view.report.findings[:1])


def _action_of(pool: NodePool, name: str) -> str | None:
    """Return what is due for the node; the supervisor does it, or only announces it in a dry run."""
    for each in pool.plan.dry:
        if each.node == name and isinstance(each, (Taint, Drain, Release)):
            return type(each).__name__.lower()
    return None


def explained(pool: NodePool, name: str) -> dict[str, Any]:
    """Return everything that is known about a node, as `holdfast nodes explain -o json` prints it."""
    view, policy = pool.views[name], pool.settings.policy
    held, waiver = view.quarantine, view.waiver
    found = view.report.findings if view.report is not None else ()
    weighed = evidence.weigh(view, found, pool.now_s)
    return {
        **row_of(pool, name),
        "verdict": pool.nodes[name].verdict or None,
        "decided": pool.nodes[name].last_decision.get("why"),
        "findings": [
            {
                "key": each.key,
                "level": each.level,
                "action": each.action,
                "held_s": round(view.silent_s + each.held_s, 1) if math.isfinite(view.silent_s) else None,
                "sources": list(each.sources),
                "origins": list(evidence.origins_of(each)),
                "backing": list(each.backing),
                "lasting": each.lasting,
                "corroborated": evidence.is_corroborated(each),
            }
            for each in weighed
        ],
        "evidence": list(held.evidence) if held is not None else [],
        "blind": list(view.report.blind) if view.report is not None else [],
        "runs": [{"at": each.at_s, "device": each.device, "why": each.why} for each in view.runs],
        "history": [
            {"at": each.at_s, "action": each.action, "relapse": each.relapse} for each in view.history
        ],
        "waiver": {"at": waiver.at_s, "until": waivers.ends_at_s(waiver, policy)} if waiver else None,
        "release_needs": release_needs(view, pool.now_s, policy) if held is not None else [],
        "breaker": pool.breaker_line,
        "pool": [each.why for each in pool.plan.holds if not each.node],
    }


def release_needs(view: NodeView, now_s: float, policy: NodePolicy) -> list[str]:
    """Return what must happen before the node is released, one clause for each condition."""
    held, report = view.quarantine, view.report
    assert held is not None, "only a quarantined node is released"
    if OPERATOR in held.sources:
        return ["an operator releases it, because an operator has taken it out"]
    needs = []
    if held.replace and not release.is_remedied(view):
        needs.append(f"{', '.join(held.replace)} is replaced, and another GPU is seen in its place")
    elif release.remedy(held) == "reboot_node" and not release.is_remedied(view):
        needs.append("the node boots; without a boot, it must be healthy for four times as long")
    if report is None or breaker.is_unknown(view, policy):
        return [*needs, "its agent reports again"]
    if evidence.unhealthy(report):
        needs.append("its unhealthy findings end")
    if blind := release.blind_sensors(report, held):
        needs.append(f"{', '.join(blind)} can measure again")
    needed_s, proven_s = release.required_health_s(view, now_s, policy), release.proof_s(report, held, now_s)
    needs.append(f"its sensors report it as healthy for {needed_s:.0f} s (so far {proven_s:.0f} s)")
    return needs
