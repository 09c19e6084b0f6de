"""Decide which nodes to taint, drain or release. Pure: no clock, network or randomness.

- A node whose agent is silent is unknown. No action is taken on it, whatever it reported before.
- A node that somebody else has cordoned is left to them. A node that an operator has released stays in
service
  until something else is found.
- An unhealthy node gets our taint once that is confirmed (`evidence`), there is no storm (`storms`) and there
  is room (`breaker`), the worst node first. A degraded node keeps its work.
- A node is drained only for a remedy that needs it empty, for a fault that does not pass without a remedy,
and
  if two witnesses report that fault.
- A node is released once it has been well for long enough (`release`), as seen by the sensors that found it
  unhealthy.

An action may make the next one possible: a taint a drain, a release another taint. Whether the actions are
carried out at once or one by one, by one process or by several in turn, the pool reaches the same state, and
then no further action is requested.
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
    Action,
    Drain,
    Forget,
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    PoolView,
    Quarantine,
    Report,
    Taint,
)
from supervisor.quarantine.storms import StormState


def decide(pool: PoolView, policy: NodePolicy) -> tuple[Action, ...]:
    """Return the actions to take now, then the holds, which say why an action is not taken."""
    candidates = _candidates(pool, policy)
    storm = storms.detect(pool, candidates, policy)
    actions: list[Action] = []
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
    """Return the nodes that may need an action or a hold: few of thousands."""
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
    """True if the taint takes no further node out of service, so it needs no room."""
    return taint.effect != NO_NEW_WORK or breaker.is_out(node)


def _admitted(
    wanted: Sequence[tuple[NodeView, Taint]], waiting: int, crowd: frozenset[str], state: Breaker
) -> list[Action]:
    """Return taints for as many nodes as there is room for, and holds for the rest.

    The nodes of a `crowd`, of which `waiting` are to be taken out, come last: all of them, or none.
    """
    alone = _worst_first([each for each in wanted if each[0].name not in crowd])
    others = _worst_first([each for each in wanted if each[0].name in crowd])
    if others and waiting > state.room - len(alone):
        why = f"{waiting} nodes turned bad together, and there is no room for all: a person must look"
        return [*_up_to(alone, state.room, state.why), *[Hold(node.name, why) for node, _ in others]]
    return _up_to([*alone, *others], state.room, state.why)


def _up_to(wanted: Sequence[tuple[NodeView, Taint]], room: int, why: str) -> list[Action]:
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


def node_action(node: NodeView, now_s: float, storm: StormState, policy: NodePolicy) -> Action | None:
    """Return the action for one node as if the breaker had room; None if the node needs none."""
    report = node.report
    if report is None:
        return Hold(node.name, "unknown: no agent has reported")
    if is_unknown(node, policy):
        return Hold(node.name, f"unknown: its agent has said nothing for {node.silent_s:.0f} s")
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
    """True if the node is unhealthy and in service, and no cordon or waiver protects it."""
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
) -> Action:
    findings = _not_waived(node, evidence.unhealthy(report))
    if not findings:
        return Hold(node.name, "an operator has let it back, and nothing else has been found since")
    if node.cordoned:
        return Hold(node.name, "cordoned by somebody else: left to them")
    left_s = evidence.unconfirmed_s(findings, policy)
    if left_s > 0:
        return Hold(node.name, f"{evidence.describe(findings)}: to be confirmed", now_s + left_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    # The taint ends the waiver, so its evidence has to contain every confirmed finding, waived ones too.
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
    """Return the taint with what has been found since the node was taken out; None if that is nothing new."""
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
    """Return both, sorted; if they are too many, old ones are dropped."""
    kept = [key for key in old if key not in new][: MAX_EVIDENCE - len(new)]
    return tuple(sorted((*new, *kept)))


def _drain_or_hold(
    node: NodeView,
    bad: tuple[NodeFinding, ...],
    held: Quarantine,
    now_s: float,
    storm: StormState,
    policy: NodePolicy,
) -> Action:
    wanting = tuple(each for each in bad if evidence.wants_drain(each, policy))
    if not node.busy or not wanting:
        return Hold(node.name, f"out: {evidence.describe(bad)}")
    if held.drain_at_s is not None:
        return Hold(node.name, "what runs there is being ended")
    if node.cordoned:
        return Hold(node.name, "cordoned by somebody else: what runs there is left to them")
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
            f"{evidence.describe(corroborated)}: to be confirmed",
            now_s + evidence.unconfirmed_s(corroborated, policy),
        )
    return Hold(node.name, f"{evidence.describe(wanting)}: one witness keeps new work off, and ends none")


# -- nodes in service that are not unhealthy


def _forget_or_avoid(
    node: NodeView, report: Report, now_s: float, storm: StormState, policy: NodePolicy
) -> Action | None:
    if node.waiver is not None and report.clean_s >= release.required_health_s(node, now_s, policy):
        return Forget(node.name, "well for long enough: what was waived is over", node.version)
    if not policy.prefer_away or node.cordoned:
        return None
    found = _not_waived(
        node, tuple(each for each in report.findings if each.level == DEGRADED)[:MAX_EVIDENCE]
    )
    if not found:
        return None
    left_s = policy.confirm_alone_s - max(each.held_s for each in found)
    if left_s > 0:
        return Hold(node.name, f"{evidence.describe(found)}: to be confirmed", now_s + left_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    return _taint(node, report, found, PREFER_NOT)
