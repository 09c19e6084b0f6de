"""Compute the state of a node after an action, for one patch of the node. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.quarantine.model import (
    MAX_EVIDENCE,
    MAX_HISTORY,
    NO_NEW_WORK,
    Drain,
    Forget,
    Hold,
    NodePolicy,
    NodeView,
    PastQuarantine,
    Quarantine,
    QuarantineAction,
    Release,
    Taint,
    Waiver,
)


def after(node: NodeView, action: QuarantineAction, now_s: float, policy: NodePolicy) -> NodeView:
    """Return the node after `action`, which must concern this node. Applying it again changes nothing."""
    if isinstance(action, Taint):
        return _tainted(node, action, now_s, policy)
    if isinstance(action, Drain):
        held = node.quarantine
        if held is None or held.drain_at_s is not None:
            return node
        return replace(node, quarantine=replace(held, drain_at_s=now_s))
    if isinstance(action, Release):
        return replace(node, quarantine=None, released_at_s=now_s) if node.quarantine else node
    if isinstance(action, Forget):
        return replace(node, waiver=None)
    assert isinstance(action, Hold)
    return node


def released_by_operator(node: NodeView, now_s: float) -> NodeView:
    """Return the node after an operator has removed the taint by hand. This waives the taint's evidence."""
    held = node.quarantine
    if held is None:
        return node
    # What has just been released comes first, because the waiver must not leave it out.
    before = [key for key in (node.waiver.evidence if node.waiver else ()) if key not in held.evidence]
    known = (*held.evidence, *before)[:MAX_EVIDENCE]
    boot_id = node.report.boot_id if node.report is not None else ""
    waiver = Waiver(tuple(sorted(known)), now_s, boot_id)
    return replace(node, quarantine=None, waiver=waiver, released_at_s=now_s)


def _tainted(node: NodeView, action: Taint, now_s: float, policy: NodePolicy) -> NodeView:
    held = node.quarantine
    record = (action.evidence, action.action, action.sources, action.boot_id)
    gpus = (action.replace, action.gpus)
    if held is not None and held.effect == action.effect:
        updated = Quarantine(*record, held.at_s, action.effect, held.drain_at_s, *gpus)
        return replace(node, quarantine=updated)
    history = node.history
    if action.effect == NO_NEW_WORK:
        history = (*history, _past_quarantine(node, action, now_s, policy))[-MAX_HISTORY:]
    quarantine = Quarantine(*record, now_s, action.effect, None, *gpus)
    waiver = None if action.effect == NO_NEW_WORK else node.waiver
    return replace(node, quarantine=quarantine, waiver=waiver, history=history)


def _past_quarantine(node: NodeView, action: Taint, now_s: float, policy: NodePolicy) -> PastQuarantine:
    released_at_s = node.released_at_s
    relapse = released_at_s is not None and now_s - released_at_s < policy.relapse_s
    return PastQuarantine(now_s, action.action, relapse)
