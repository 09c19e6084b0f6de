"""Decide which nodes to taint, drain or release. Pure: no clock, network or randomness.

- If a node's agent is silent, its state is unknown. No action is taken on it, whatever the agent reported
  before.
- A node that someone else has cordoned is left alone. A node that an operator has released stays in service
  until its agent reports a different fault.
- An unhealthy node is tainted once its fault is confirmed (`evidence`), if there is no storm (`storms`) and
  the breaker has room (`breaker`). The worst nodes come first. A degraded node keeps its work.
- A node is drained only if two witnesses report its fault, the fault does not end without a remedy, and the
  remedy requires an empty node.
- A node is released when the sensors that found it unhealthy have reported it as healthy for long enough
  (`release`).

One action can make another possible: a node can be drained only after it was tainted, and a release makes
room for another taint. The pool reaches the same final state whether the actions are carried out together or
one by one, and by one process or by several in turn. In that state, no action is requested.
"""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.quarantine import breaker, evidence, release, storms
from supervisor.quarantine.breaker import Breaker, is_unknown
from supervisor.quarantine.model import (
    DEGRADED,
    MAX_EVIDENCE,
    NO_NEW_WORK,
    PREFER_NOT,
    Drain,
    Forget,
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    PoolView,
    Quarantine,
    QuarantineAction,
    Report,
    Taint,
)
from supervisor.quarantine.storms import StormState


def decide(pool: PoolView, policy: NodePolicy) -> tuple[QuarantineAction, ...]:
    """Return the actions to take now, followed by the holds. Each hold says why no action is taken."""
    candidates = _candidates(pool, policy)
    storm = storms.detect(pool, candidates, policy)
    actions: list[QuarantineAction] = []
    wanted: list[tuple[NodeView, Taint]] = []
    for node in candidates:
        action = node_action(node, pool.now_s, storm, policy)
        if isinstance(action, Taint) and not _is_free(node, action):
            wanted.append((node, action))
        elif action is not None:
            actions.append(action)
    waiting = sum(1 for node in candidates if node.name in storm.crowd and is_waiting(node))
    actions += _admitted(wanted, waiting, storm.crowd, breaker.assess(len(pool.nodes), candidates, policy))
    if storm.everywhere is not None:
        actions.append(Hold("", storm.everywhere.why, storm.everywhere.until_s))
    return tuple(sorted(actions, key=lambda each: isinstance(each, Hold)))


def _candidates(pool: PoolView, policy: NodePolicy) -> list[NodeView]:
    """Return the nodes that may need an action or a hold: usually a few out of thousands."""
    stale_s, memory_s = policy.stale_s, policy.memory_s
    return [
        node
        for node in pool.nodes
        if (report := node.report) is None
        or report.findings
        or report.calmed_s < memory_s
        or node.quarantine is not None
        or node.silent_s > stale_s
        or node.cordoned
        or not node.ready
        or node.waiver is not None
    ]


def _is_free(node: NodeView, taint: Taint) -> bool:
    """True if the taint takes no node out of service, so that it needs no room in the breaker."""
    return taint.effect != NO_NEW_WORK or breaker.is_out(node)


def _admitted(
    wanted: Sequence[tuple[NodeView, Taint]], waiting: int, crowd: frozenset[str], state: Breaker
) -> list[QuarantineAction]:
    """Return taints for as many nodes as the breaker has room for, and holds for the others.

    The nodes of the `crowd` come last. They are tainted only if there is room for all of them; `waiting` is
    the number of nodes in the crowd that still need a taint.
    """
    alone = _worst_first([each for each in wanted if each[0].name not in crowd])
    others = _worst_first([each for each in wanted if each[0].name in crowd])
    if others and waiting > state.room - len(alone):
        why = (
            f"{waiting} nodes became unhealthy together, too many for the breaker:"
            " an operator must investigate"
        )
        return [*_up_to(alone, state.room, state.why), *[Hold(node.name, why) for node, _ in others]]
    return _up_to([*alone, *others], state.room, state.why)


def _up_to(wanted: Sequence[tuple[NodeView, Taint]], room: int, why: str) -> list[QuarantineAction]:
    return [
        taint if at < room else Hold(node.name, f"{taint.why}; {why}")
        for at, (node, taint) in enumerate(wanted)
    ]


def _worst_first(wanted: list[tuple[NodeView, Taint]]) -> list[tuple[NodeView, Taint]]:
    by_name = sorted(wanted, key=lambda each: each[0].name)
    return sorted(by_name, key=lambda each: _severity(each[0]), reverse=True)


def _severity(node: NodeView) -> tuple[bool, bool, int, float]:
    assert node.report is not None, "a node without a report is not tainted"
    return evidence.severity(evidence.unhealthy(node.report))


def node_action(
    node: NodeView, now_s: float, storm: StormState, policy: NodePolicy
) -> QuarantineAction | None:
    """Return the action for one node if the breaker has room; None if the node needs no action."""
    report = node.report
    if report is None:
        return Hold(node.name, "unknown: no agent has reported")
    if is_unknown(node, policy):
        return Hold(node.name, f"unknown: its agent has not reported for {node.silent_s:.0f} s")
    bad = evidence.unhealthy(report)
    held = node.quarantine
    if held is not None and held.effect == NO_NEW_WORK:
        if not bad:
            return release.release_quarantined(node, report, held, now_s, policy)
        update = _updated_taint(node, report, held, storm, policy)
        return update or _drain_or_hold(node, bad, held, now_s, storm, policy)
    if bad:
        return _taint_or_hold(node, report, now_s, storm, policy)
    if held is not None:
        return release.release_avoided(node, report, now_s, policy)
    return _forget_or_avoid(node, report, now_s, storm, policy)


def is_waiting(node: NodeView) -> bool:
    """True if the node is unhealthy and in service, and neither a cordon nor a waiver protects it."""
    if node.report is None or node.cordoned or _has_taint(node, NO_NEW_WORK):
        return False
    return bool(_not_waived(node, evidence.unhealthy(node.report)))


def _has_taint(node: NodeView, effect: str) -> bool:
    return node.quarantine is not None and node.quarantine.effect == effect


def _not_waived(node: NodeView, findings: tuple[NodeFinding, ...]) -> tuple[NodeFinding, ...]:
    """Return the findings that no operator has waived."""
    if node.waiver is None:
        return findings
    return tuple(each for each in findings if each.key not in node.waiver.evidence)


def _confirmed(findings: tuple[NodeFinding, ...], policy: NodePolicy) -> tuple[NodeFinding, ...]:
    return tuple(each for each in findings if evidence.unconfirmed_s((each,), policy) <= 0)


# -- unhealthy nodes in service


def _taint_or_hold(
    node: NodeView, report: Report, now_s: float, storm: StormState, policy: NodePolicy
) -> QuarantineAction:
    findings = _not_waived(node, evidence.unhealthy(report))
    if not findings:
        return Hold(node.name, "an operator has released it, and no other fault has been found since")
    if node.cordoned:
        return Hold(node.name, "cordoned by someone else")
    left_s = evidence.unconfirmed_s(findings, policy)
    if left_s > 0:
        return Hold(node.name, f"{evidence.describe(findings)}: not confirmed yet", now_s + left_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    # The taint ends the waiver, so its evidence must include every confirmed finding, even a waived one.
    return _taint(node, report, _confirmed(evidence.unhealthy(report), policy), NO_NEW_WORK)


def _taint(node: NodeView, report: Report, found: tuple[NodeFinding, ...], effect: str) -> Taint:
    return Taint(
        node.name,
        effect,
        evidence.keys(found),
        evidence.costliest_action(found),
        evidence.sources(found),
        report.boot_id,
        evidence.describe(found),
        node.version,
    )


# -- unhealthy nodes out of service


def _updated_taint(
    node: NodeView, report: Report, held: Quarantine, storm: StormState, policy: NodePolicy
) -> Taint | None:
    """Return the taint updated with findings since the node was taken out; None if there are none."""
    confirmed = _confirmed(evidence.unhealthy(report), policy)
    costlier = evidence.cost_rank(evidence.costliest_action(confirmed)) > evidence.cost_rank(held.action)
    if (
        not confirmed
        or storm.reason_for(node.name)
        or not (costlier or set(evidence.keys(confirmed)) - set(held.evidence))
    ):
        return None
    taint = _taint(node, report, confirmed, NO_NEW_WORK)
    action = max(taint.action, held.action, key=evidence.cost_rank)
    keys = _merged(taint.evidence, held.evidence)
    sources = tuple(sorted({*taint.sources, *held.sources}))
    return Taint(node.name, NO_NEW_WORK, keys, action, sources, held.boot_id, taint.why, node.version)


def _merged(new: tuple[str, ...], old: tuple[str, ...]) -> tuple[str, ...]:
    """Return all keys, sorted. If there are more than `MAX_EVIDENCE`, drop some of `old`."""
    kept = [key for key in old if key not in new][: MAX_EVIDENCE - len(new)]
    return tuple(sorted((*new, *kept)))


def _drain_or_hold(
    node: NodeView,
    bad: tuple[NodeFinding, ...],
    held: Quarantine,
    now_s: float,
    storm: StormState,
    policy: NodePolicy,
) -> QuarantineAction:
    wanting = tuple(each for each in bad if evidence.wants_drain(each, policy))
    if not node.busy or not wanting:
        return Hold(node.name, f"out: {evidence.describe(bad)}")
    if held.drain_at_s is not None:
        return Hold(node.name, "its work is being ended")
    if node.cordoned:
        return Hold(node.name, "cordoned by someone else, so its work is left alone")
    reason = storm.reason_for(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    grounds = tuple(each for each in wanting if evidence.may_drain(each, policy))
    if grounds:
        return Drain(node.name, evidence.describe(grounds), node.version)
    corroborated = tuple(each for each in wanting if evidence.is_corroborated(each))
    if corroborated:
        return Hold(
            node.name,
            f"{evidence.describe(corroborated)}: not confirmed yet",
            now_s + evidence.unconfirmed_s(corroborated, policy),
        )
    return Hold(node.name, f"{evidence.describe(wanting)}: one witness does not justify a drain")


# -- nodes in service that are not unhealthy


def _forget_or_avoid(
    node: NodeView, report: Report, now_s: float, storm: StormState, policy: NodePolicy
) -> QuarantineAction | None:
    if node.waiver is not None and report.clean_s >= release.required_health_s(node, now_s, policy):
        return Forget(node.name, "healthy for long enough: the waived findings are over", node.version)
    if not policy.prefer_away or node.cordoned:
        return None
    found = _not_waived(
        node, tuple(each for each in report.findings if each.level == DEGRADED)[:MAX_EVIDENCE]
    )
    if not found:
        return None
    left_s = policy.confirm_alone_s - max(each.held_s for each in found)
    if left_s > 0:
        return Hold(node.name, f"{evidence.describe(found)}: not confirmed yet", now_s + left_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    return _taint(node, report, found, PREFER_NOT)
