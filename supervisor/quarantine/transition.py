"""Compute the state of a node after an action, which is stored in a single patch. Pure.

A stored time can be later than now if the clock of the deciding process was ahead. Until that time has
passed, a waiver would cover faults that began after the release, nothing would become an alert, and no proof
of health would begin. Such a time is therefore replaced by now. The correction is stored, because otherwise
each decision would move the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from supervisor.quarantine import release
from supervisor.quarantine.breaker import is_unknown
from supervisor.quarantine.model import (
    MAX_EVIDENCE,
    MAX_HISTORY,
    MAX_RUNS,
    NO_NEW_WORK,
    OPERATOR,
    Drain,
    Forget,
    Hold,
    NodePolicy,
    NodeView,
    PastQuarantine,
    Quarantine,
    QuarantineAction,
    Refresh,
    Release,
    RunFault,
    Taint,
    Waiver,
)

MAX_WORD = 120  # characters of the evidence of an operator's request
RUNS_S = 86400.0  # how long a run's fault is kept; by then, the fault's own finding has been confirmed


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
    if isinstance(action, Refresh):
        return _refreshed(node, now_s, policy)
    assert isinstance(action, Hold)
    return node


def _refreshed(node: NodeView, now_s: float, policy: NodePolicy) -> NodeView:
    node = _without_future(node, now_s)
    held, report = node.quarantine, node.report
    if held is None or report is None or is_unknown(node, policy):
        return node
    return replace(node, quarantine=release.with_blind_time(held, report, node.silent_s, now_s))


def _without_future(node: NodeView, now_s: float) -> NodeView:
    """Return the node, with each stored time that is later than now replaced by now."""
    held, waiver, released_at_s = node.quarantine, node.waiver, node.released_at_s
    if held is not None:
        drain_at_s = None if held.drain_at_s is None else min(held.drain_at_s, now_s)
        blind_at_s = None if held.blind_at_s is None else min(held.blind_at_s, now_s)
        held = replace(held, at_s=min(held.at_s, now_s), drain_at_s=drain_at_s, blind_at_s=blind_at_s)
    return replace(
        node,
        quarantine=held,
        waiver=None if waiver is None else replace(waiver, at_s=min(waiver.at_s, now_s)),
        history=tuple(replace(each, at_s=min(each.at_s, now_s)) for each in node.history),
        released_at_s=None if released_at_s is None else min(released_at_s, now_s),
        runs=not_later(node.runs, now_s),
    )


def times(node: NodeView) -> Iterator[float]:
    """Yield each time that is stored on the node."""
    held, waiver = node.quarantine, node.waiver
    if held is not None:
        yield from (each for each in (held.at_s, held.drain_at_s, held.blind_at_s) if each is not None)
    if waiver is not None:
        yield waiver.at_s
    if node.released_at_s is not None:
        yield node.released_at_s
    for each in node.history:
        yield each.at_s
    for fault in node.runs:
        yield fault.at_s


def released_by_operator(node: NodeView, now_s: float) -> NodeView:
    """Return the node after an operator has removed the taint by hand. This waives the taint's evidence."""
    held = node.quarantine
    if held is None:
        return node
    # The evidence of the removed taint comes first, because the waiver must cover all of it.
    before = [key for key in (node.waiver.evidence if node.waiver else ()) if key not in held.evidence]
    known = (*held.evidence, *before)[:MAX_EVIDENCE]
    boot_id = node.report.boot_id if node.report is not None else ""
    waiver = Waiver(tuple(sorted(known)), now_s, boot_id)
    return replace(node, quarantine=None, waiver=waiver, released_at_s=now_s)


def quarantined_by_operator(node: NodeView, why: str, now_s: float, *, drain: bool = False) -> NodeView:
    """Return the node after an operator has taken it out. Only an operator releases it (`release`).

    This does not count as an incident in the node's history, because there is no evidence of a failure.
    """
    held, key = node.quarantine, f"{OPERATOR}: {why}"[:MAX_WORD]
    if held is None or held.effect != NO_NEW_WORK:
        boot_id = node.report.boot_id if node.report is not None else ""
        held = Quarantine((), "none", (), boot_id, now_s)
    if OPERATOR not in held.sources:
        kept = held.evidence[: MAX_EVIDENCE - 1]
        sources = tuple(sorted({*held.sources, OPERATOR}))
        held = replace(held, evidence=tuple(sorted({*kept, key})), sources=sources)
    if drain and held.drain_at_s is None:
        held = replace(held, drain_at_s=now_s)
    return replace(node, quarantine=held, waiver=None)


def not_later(faults: Iterable[RunFault], now_s: float) -> tuple[RunFault, ...]:
    """Return the faults, with each time that is later than now replaced by now.

    Such a time comes from a clock that was ahead. Without this function, the next record of these faults
    would undo the correction of the times that are stored on the node.
    """
    return tuple(replace(each, at_s=min(each.at_s, now_s)) for each in faults)


def with_run_faults(node: NodeView, faults: Iterable[RunFault], now_s: float) -> NodeView:
    """Return the node with what runs have seen on it: the newest `MAX_RUNS` faults of the last `RUNS_S`."""
    found = sorted({*node.runs, *faults}, key=lambda each: (each.at_s, each.device, each.why))
    return replace(node, runs=tuple(each for each in found if each.at_s > now_s - RUNS_S)[-MAX_RUNS:])


def _tainted(node: NodeView, action: Taint, now_s: float, policy: NodePolicy) -> NodeView:
    held = node.quarantine
    record = (action.evidence, action.action, action.sources, action.boot_id)
    gpus = (action.replace, action.gpus)
    if held is not None and held.effect == action.effect:
        updated = Quarantine(
            *record, held.at_s, action.effect, held.drain_at_s, *gpus, held.blind_at_s, held.blind_s,
            action.state_id, action.remedies, action.is_cut,
        )  # fmt: skip
        return replace(node, quarantine=updated)
    history = node.history
    if action.effect == NO_NEW_WORK:
        history = (*history, _past_quarantine(node, action, now_s, policy))[-MAX_HISTORY:]
    quarantine = Quarantine(
        *record, now_s, action.effect, None, *gpus,
        state_id=action.state_id, remedies=action.remedies, is_cut=action.is_cut,
    )  # fmt: skip
    waiver = None if action.effect == NO_NEW_WORK else node.waiver
    return replace(node, quarantine=quarantine, waiver=waiver, history=history)


def _past_quarantine(node: NodeView, action: Taint, now_s: float, policy: NodePolicy) -> PastQuarantine:
    released_at_s = node.released_at_s
    relapse = released_at_s is not None and now_s - released_at_s < policy.relapse_s
    return PastQuarantine(now_s, action.action, relapse)
