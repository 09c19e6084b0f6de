"""Decide which nodes to taint, drain or release. Pure: no clock, network or randomness.

- If a node's agent is silent, its state is unknown. No action is taken on it, no matter what the agent
  reported before.
- A node cordoned by someone else is left alone. A node released by an operator stays in service until there
  is newer evidence (`waivers`).
- An unhealthy node is tainted when its fault is confirmed (`evidence`), if there is no storm (`storms`) and
  the breaker has room (`breaker`, `admission`). The worst nodes come first. A degraded node keeps its work.
- A node is drained only if two witnesses report its fault, the fault does not end without a remedy, and the
  remedy requires an empty node.
- A node is released when the sensors that found it unhealthy have reported it as healthy for long enough
  (`release`). Time during which one of them could not measure does not count. If the breaker is full, a node
  that is only proving its health may return early, to make room for a node with a proven fault.
- No problem is forgotten: each hold ends at a known time, or it is an alert.
- The data stored on a node is corrected first, even if its agent is silent (`transition.after`).

One action can enable another: a node can be drained only after it was tainted, and a release makes room for
another taint. The pool reaches the same final state whether the actions are carried out together or one by
one, by one process or by several processes one after another. In that state, no more actions are requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.node_report import DEGRADED, cost_rank
from supervisor.quarantine import admission, breaker, evidence, release, storms, transition, waivers
from supervisor.quarantine.admission import Wanted
from supervisor.quarantine.breaker import is_tainted, is_unknown
from supervisor.quarantine.cohorts import Reason
from supervisor.quarantine.model import (
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
    Refresh,
    Release,
    Report,
    Taint,
)
from supervisor.quarantine.storms import StormState

RECENT_S = 86400.0  # a node that has been well for so long needs no operator


def decide(pool: PoolView, policy: NodePolicy) -> tuple[QuarantineAction, ...]:
    """Return the actions to take now, followed by the holds. Each hold says why no action is taken."""
    candidates = _candidates(pool, policy)
    storm = storms.detect(pool, candidates, policy)
    may_correct = pool.is_clock_checked and not pool.clock_doubt
    actions: list[QuarantineAction] = []
    wanted: list[Wanted] = []
    for node in candidates:
        action = node_action(node, pool.now_s, storm, policy, may_correct=may_correct)
        action = _unless_doubtful(node, action, pool)
        if isinstance(action, Taint) and not _is_free(node, action):
            wanted.append((node, waivers.counted(node, pool.now_s, policy), action))
        elif action is not None:
            actions.append(action)
    crowd = storm.crowd
    waiting = sum(1 for each in candidates if each.name in crowd and is_waiting(each, pool.now_s, policy))
    # A taint of a node that others took out lowers `allowed`, so the taint must count even before it is
    # carried out.
    tainted = _after(pool, candidates, [each for each in actions if isinstance(each, Taint)], policy)
    state = breaker.assess(len(pool.nodes), tainted, policy)
    if len(wanted) > state.room:
        releases = [each for each in actions if isinstance(each, Release)]
        later = breaker.assess(len(pool.nodes), _after(pool, tainted, releases, policy), policy)
        proving = [
            each for each in tainted if not pool.clock_doubt and _may_be_traded(each, pool.now_s, policy)
        ]
        traded = {
            each.node: each for each in admission.trades(wanted, crowd, proving, later.balance, pool.now_s)
        }
        actions = [traded.pop(each.node, each) for each in actions]
    actions += admission.admitted(wanted, waiting, crowd, state, pool.now_s, policy)
    if storm.everywhere is not None:
        actions.append(Hold("", storm.everywhere.why, storm.everywhere.until_s))
    for node in candidates:
        actions += (Hold(node.name, why, alert=True) for why in _alerts(node, pool.now_s, policy))
    return tuple(sorted(actions, key=lambda each: isinstance(each, Hold)))


def _alerts(node: NodeView, now_s: float, policy: NodePolicy) -> Iterator[str]:
    """Yield what an operator must know about the node, no matter what is done about its findings."""
    report = node.report
    if report is None:
        return
    if node.refused:
        yield node.refused
    if is_unknown(node, policy) or is_tainted(node):
        return
    if report.may_hide_faults:
        yield (
            f"its report has no room for {report.left_out} of its findings, so they are not considered:"
            " `holdfast node check` lists them on the node"
        )
    if _comes_and_goes(node, report, now_s, policy):
        yield (
            "its faults come and go: it has been unhealthy on many occasions within about a day, for"
            f" {report.unsteady_s / 60:.0f} min"
        )


def _comes_and_goes(node: NodeView, report: Report, now_s: float, policy: NodePolicy) -> bool:
    """True if a node in service turns bad again and again, each time for too short to be taken out.

    What happened before its last release does not count.
    """
    if report.unsteady_s < evidence.UNSTEADY_S or node.cordoned:
        return False
    if evidence.unhealthy(report):
        return bool(waivers.counted(node, now_s, policy))
    ended_s = node.silent_s + report.calmed_s
    return ended_s < RECENT_S and (node.released_at_s is None or now_s - ended_s > node.released_at_s)


def _after(
    pool: PoolView, nodes: Sequence[NodeView], actions: Sequence[QuarantineAction], policy: NodePolicy
) -> Sequence[NodeView]:
    """Return the nodes as they will be after the actions."""
    if not actions:
        return nodes
    by_node = {each.node: each for each in actions}
    return [
        transition.after(node, by_node[node.name], pool.now_s, policy) if node.name in by_node else node
        for node in nodes
    ]


def _may_be_traded(node: NodeView, now_s: float, policy: NodePolicy) -> bool:
    if _refresh(node, now_s, policy) is not None:
        return False
    return is_tainted(node) and not is_unknown(node, policy) and release.may_be_traded(node, now_s, policy)


def _candidates(pool: PoolView, policy: NodePolicy) -> list[NodeView]:
    """Return the nodes that may need an action or a hold: usually a few out of thousands."""
    stale_s, memory_s, unsteady_s = policy.stale_s, policy.memory_s, evidence.UNSTEADY_S
    return [
        node
        for node in pool.nodes
        if (report := node.report) is None
        or report.findings
        or report.calmed_s < memory_s
        or report.unsteady_s >= unsteady_s
        or report.left_out
        or node.quarantine is not None
        or node.silent_s > stale_s
        or node.cordoned
        or not node.ready
        or node.waiver is not None
        or node.refused
        or any(each > pool.now_s for each in transition.times(node))
    ]


def _is_free(node: NodeView, taint: Taint) -> bool:
    """True if the taint takes no node out of service, so it needs no room in the breaker."""
    return taint.effect != NO_NEW_WORK or breaker.is_out(node)


def _unless_doubtful(
    node: NodeView, action: QuarantineAction | None, pool: PoolView
) -> QuarantineAction | None:
    """Return a hold instead of an action that only the time justifies, if the clock is in doubt.

    An early release, or the early end of an operator's release, cannot be undone when the clock is right.
    """
    if not pool.clock_doubt or action is None:
        return action
    overrules = isinstance(action, Taint) and action.effect == NO_NEW_WORK and node.waiver is not None
    known = {*node.waiver.evidence} if node.waiver is not None else frozenset[str]()
    if isinstance(action, (Release, Forget)) or (
        overrules and isinstance(action, Taint) and {*action.evidence} <= known
    ):
        return Hold(node.name, f"{action.why}; but {pool.clock_doubt}", alert=True)
    return action


def node_action(
    node: NodeView, now_s: float, storm: StormState, policy: NodePolicy, *, may_correct: bool = True
) -> QuarantineAction | None:
    """Return the action for one node if the breaker has room; None if the node needs no action.

    Without `may_correct`, a stored time that is later than now remains, because the clock may be behind.
    """
    refresh = _refresh(node, now_s, policy, may_correct=may_correct)
    if refresh is not None:
        return refresh
    report = node.report
    if report is None or is_unknown(node, policy):
        return _hold_unknown(node, now_s, policy)
    bad = evidence.unhealthy(report)
    held = node.quarantine
    if held is not None and held.effect == NO_NEW_WORK:
        if not bad:
            return release.release_quarantined(node, report, held, now_s, policy)
        weighed = evidence.weigh(node, evidence.most(bad), now_s)
        update = _updated_taint(node, report, weighed, held, storm, policy)
        return update or _drain_or_hold(node, weighed, held, now_s, storm, policy)
    if bad:
        return _taint_or_hold(node, report, bad, now_s, storm, policy)
    if held is not None:
        return release.release_avoided(node, report, held, now_s, policy)
    return _forget_or_avoid(node, report, now_s, storm, policy)


def _refresh(node: NodeView, now_s: float, policy: NodePolicy, *, may_correct: bool = True) -> Refresh | None:
    """Return the correction of the data stored on the node; None if the data is correct."""
    if may_correct and any(each > now_s for each in transition.times(node)):
        why = "it has a stored time that is later than now: the clock was ahead"
        return Refresh(node.name, why, node.version)
    held, report = node.quarantine, node.report
    if held is None or report is None or is_unknown(node, policy):
        return None
    after = release.with_blind_time(held, report, node.silent_s, now_s)
    if after is held:
        return None
    if after.blind_at_s is not None:
        why = f"{', '.join(release.blind_sensors(report, held))} cannot measure"
    else:
        why = "its sensors can measure again" if after.blind_s else "its healthy time has restarted"
    return Refresh(node.name, f"its proof of health is counted differently: {why}", node.version)


def is_waiting(node: NodeView, now_s: float, policy: NodePolicy) -> bool:
    """True if the node is unhealthy and in service, and neither a cordon nor a waiver protects it."""
    if node.cordoned or is_tainted(node):
        return False
    return bool(waivers.counted(node, now_s, policy))


def _hold_unknown(node: NodeView, now_s: float, policy: NodePolicy) -> Hold:
    if node.refused:
        return Hold(node.name, f"unknown: {node.refused}", alert=True)
    if node.report is None:
        return Hold(node.name, "unknown: no agent has reported", alert=True)
    why = f"unknown: its agent has not reported for {node.silent_s:.0f} s"
    return release.waiting(node, why, node.silent_s, policy.alert_s, now_s)


def _hold_for(node: NodeView, reason: Reason, found: Sequence[NodeFinding], policy: NodePolicy) -> Hold:
    """Return a hold because of a storm.

    New trouble can prolong a storm, so the hold becomes an alert after `alert_s`.
    """
    age_s = evidence.age_s(node, found)
    if age_s < policy.alert_s or reason.alert:
        return Hold(node.name, reason.why, reason.until_s, reason.alert)
    return Hold(node.name, f"{reason.why}; for {age_s / 3600:.0f} h", reason.until_s, alert=True)


# -- unhealthy nodes in service


def _taint_or_hold(
    node: NodeView,
    report: Report,
    bad: tuple[NodeFinding, ...],
    now_s: float,
    storm: StormState,
    policy: NodePolicy,
) -> QuarantineAction:
    findings = waivers.counted(node, now_s, policy)
    if not findings:
        assert node.waiver is not None, "only a waiver covers findings"
        why = "an operator has released it, and no other fault has been found since"
        return Hold(node.name, why, waivers.ends_at_s(node.waiver, policy))
    if node.cordoned:
        age_s = evidence.age_s(node, findings)
        return release.waiting(node, "cordoned by someone else", age_s, policy.repair_s, now_s)
    left_s = evidence.unconfirmed_s(findings, policy)
    if left_s > 0:
        return Hold(node.name, f"{evidence.describe(findings)}: not confirmed yet", now_s + left_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return _hold_for(node, reason, findings, policy)
    # The taint ends the waiver, so its evidence also includes the waived findings, as far as there is room.
    new = {each.key for each in findings}
    all_found = tuple(sorted(bad, key=lambda each: each.key not in new))
    confirmed = evidence.confirmed(evidence.weigh(node, evidence.most(all_found), now_s), policy)
    return _taint(node, report, confirmed, NO_NEW_WORK)


def _taint(node: NodeView, report: Report, found: tuple[NodeFinding, ...], effect: str) -> Taint:
    bad_gpus = evidence.to_replace(found, report) if effect == NO_NEW_WORK else ()
    return Taint(
        node.name,
        effect,
        evidence.keys(found),
        evidence.costliest_action(found),
        evidence.sources(found),
        report.boot_id,
        evidence.describe(found),
        node.version,
        bad_gpus,
        len({*report.devices, *bad_gpus}) if bad_gpus else 0,
        report.state_id,
        evidence.remedies(found),
        _is_cut(report, found),
    )


def _is_cut(report: Report, found: tuple[NodeFinding, ...]) -> bool:
    """True if there may be evidence for a remedy that `found` does not contain, because there is no room."""
    bad = evidence.unhealthy(report)
    if report.may_hide_faults or len(bad) <= MAX_EVIDENCE:
        return report.may_hide_faults
    keys = {each.key for each in found}
    return any(each.remedy and each.key not in keys for each in bad)


# -- unhealthy nodes out of service


def _updated_taint(
    node: NodeView,
    report: Report,
    bad: tuple[NodeFinding, ...],
    held: Quarantine,
    storm: StormState,
    policy: NodePolicy,
) -> Taint | None:
    """Return the taint updated with findings since the node was taken out; None if there are none."""
    confirmed = evidence.confirmed(bad, policy)
    if not confirmed or storm.reason_for(node.name):
        return None
    outlived = _outlives_a_boot(confirmed, report, held)
    found_again = _is_found_again(confirmed, report, held)
    if not (outlived or found_again or _adds_something(confirmed, report, held)):
        return None
    taint = _taint(node, report, confirmed, NO_NEW_WORK)
    kept, remedies, is_cut = _merged_evidence(taint, held)
    after = replace(
        taint,
        evidence=kept,
        action=max(taint.action, held.action, key=cost_rank),
        sources=tuple(sorted({*taint.sources, *held.sources})),
        boot_id=report.boot_id if outlived else held.boot_id,
        replace=_merged(taint.replace, held.replace),
        gpus=max(held.gpus, len(report.devices)) if held.gpus else taint.gpus,
        state_id=report.state_id if found_again else held.state_id,
        remedies=remedies,
        is_cut=is_cut,
    )
    return after if _content(after) != _content(held) else None


def _adds_something(confirmed: tuple[NodeFinding, ...], report: Report, held: Quarantine) -> bool:
    """True if the findings contain a fault or need a remedy that the taint does not include.

    It may have had no room for it, and then remains as it is.
    """
    return (
        not set(evidence.keys(confirmed)) <= set(held.evidence)
        or cost_rank(evidence.costliest_action(confirmed)) > cost_rank(held.action)
        or not set(evidence.to_replace(confirmed, report)) <= set(held.replace)
        or not set(evidence.remedies(confirmed)) <= set(held.remedies)
        or (not held.is_cut and _is_cut(report, confirmed))
    )


def _content(held: Quarantine | Taint) -> tuple[object, ...]:
    """Return the parts of a taint that justify an update. Another source of a known fault does not."""
    return (
        *(held.evidence, held.action, held.boot_id, held.replace),
        *(held.state_id, held.remedies, held.is_cut),
    )


def _is_found_again(confirmed: tuple[NodeFinding, ...], report: Report, held: Quarantine) -> bool:
    """True if the agent's memory is not the same as before, but has all evidence that needs a remedy."""
    if report.state_id in ("", held.state_id) or held.is_cut:
        return False
    return release.unremedied(report, held) <= {*evidence.keys(confirmed)}


def _outlives_a_boot(confirmed: tuple[NodeFinding, ...], report: Report, held: Quarantine) -> bool:
    """True if the node has booted since it was taken out, and its current findings need another boot."""
    return report.boot_id != held.boot_id and any(
        each.lasting and each.remedy == "reboot_node" for each in confirmed
    )


def _merged_evidence(new: Taint, held: Quarantine) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the keys of both, their remedies, and whether a key that needs a remedy has been left out.

    If there are too many keys, those that need a remedy are kept first, and then the new ones. Without its
    key, a fault that the agent's memory loses would count as remedied.
    """
    both = replace(held, evidence=(*new.evidence, *held.evidence), remedies=(*new.remedies, *held.remedies))
    needed = release.remedies(both)
    ranked = sorted({*both.evidence}, key=lambda key: (key not in needed, key not in new.evidence, key))
    kept = tuple(sorted(ranked[:MAX_EVIDENCE]))
    unnamed = (f"{needed[key]} {key}" for key in kept if key in needed and needed[key] != release.named(key))
    cut = any(key in needed for key in ranked[MAX_EVIDENCE:])
    return kept, tuple(sorted(unnamed)), held.is_cut or new.is_cut or cut


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
    out_s = now_s - held.at_s
    if not node.busy or not wanting:
        return release.waiting(node, f"out: {evidence.describe(bad)}", out_s, policy.repair_s, now_s)
    if held.drain_at_s is not None:
        since_s = now_s - held.drain_at_s
        return release.waiting(node, "its work is being ended", since_s, policy.alert_s, now_s)
    if node.cordoned:
        why = "cordoned by someone else, so its work is left alone"
        return release.waiting(node, why, out_s, policy.repair_s, now_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return _hold_for(node, reason, wanting, policy)
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
    why = f"{evidence.describe(wanting)}: one witness does not justify a drain"
    return release.waiting(node, why, evidence.age_s(node, wanting), policy.alert_s, now_s)


# -- nodes in service that are not unhealthy


def _forget_or_avoid(
    node: NodeView, report: Report, now_s: float, storm: StormState, policy: NodePolicy
) -> QuarantineAction | None:
    is_over = waivers.not_waived(node, report.findings, now_s, policy) == report.findings
    proven = report.clean_s >= release.required_health_s(node, now_s, policy)
    if node.waiver is not None and is_over and proven:
        return Forget(node.name, "healthy for long enough, and the waived findings have ended", node.version)
    if node.waiver is not None and waivers.has_expired(node.waiver, now_s, policy):
        return Forget(node.name, "the operator's release has expired", node.version)
    if not policy.prefer_away or node.cordoned:
        return None
    degraded = tuple(each for each in report.findings if each.level == DEGRADED)
    found = evidence.most(waivers.not_waived(node, degraded, now_s, policy))
    if not found:
        return None
    left_s = policy.confirm_alone_s - max(each.held_s for each in found)
    if left_s > 0:
        return Hold(node.name, f"{evidence.describe(found)}: not confirmed yet", now_s + left_s)
    reason = storm.reason_for(node.name)
    if reason is not None:
        return _hold_for(node, reason, found, policy)
    return _taint(node, report, found, PREFER_NOT)
