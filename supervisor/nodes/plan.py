"""Plan what to write on the Nodes, and which drains to continue. Pure.

The plan depends only on what is on the Nodes now, so it completes what an earlier leader has begun, and never
repeats what that leader has done. One write is carried out at a time, and then everything is planned again.

What an operator has done or requested comes first. It is carried out even in a dry run, because it is not
Holdfast's decision. In a dry run, everything else is only announced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from supervisor.nodes.agent_reports import ClockError
from supervisor.nodes.node_objects import KnownNode
from supervisor.nodes.patches import DecisionNote
from supervisor.quarantine import breaker, transition
from supervisor.quarantine.breaker import Breaker
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import (
    NO_NEW_WORK,
    OPERATOR,
    Drain,
    Forget,
    Hold,
    NodePolicy,
    NodeView,
    PoolView,
    QuarantineAction,
    Refresh,
    Release,
    RunFault,
    Taint,
)

HOLDFAST = "holdfast"
RIGHT = ClockError()
# The kinds of writes, and of the metric's label
TAINTED, UPDATED, AVOIDED, DRAINED, RELEASED, FORGOTTEN, REFRESHED = (
    *("taint", "update", "avoid", "drain", "release", "forget", "refresh"),
)
OPERATOR_TOOK, OPERATOR_RELEASED, REFUSED = "operator_quarantine", "operator_release", "request_refused"
RUN_FAULTS = "run_faults"
KINDS = (
    *(TAINTED, UPDATED, AVOIDED, DRAINED, RELEASED, FORGOTTEN, REFRESHED),
    *(OPERATOR_TOOK, OPERATOR_RELEASED, REFUSED, RUN_FAULTS),
)
SILENT = (REFRESHED, RUN_FAULTS)  # bookkeeping that people need not know about
_BY_HAND = "its taint was removed by hand"
_SET_BY_HAND = "its taint was set by hand"


@dataclass(frozen=True, slots=True)
class NodeWrite:
    """A change of one Node. `note` is None if people should keep seeing the previous decision."""

    node: str
    kind: str
    why: str
    after: NodeView
    note: DecisionNote | None = None

    @property
    def is_silent(self) -> bool:
        return self.kind in SILENT


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What to do now: `writes` in this order. `dry` are the actions that a dry run only announces."""

    writes: tuple[NodeWrite, ...]
    holds: tuple[Hold, ...]
    dry: tuple[QuarantineAction, ...]
    draining: tuple[tuple[str, str], ...]  # the nodes whose work is being ended, and why
    pool: PoolView
    breaker: Breaker


def plan(
    nodes: Mapping[str, KnownNode],
    views: Mapping[str, NodeView],
    runs: Mapping[str, Sequence[RunFault]],
    policy: NodePolicy,
    now_s: float,
    *,
    is_dry: bool,
    clock: ClockError = RIGHT,
) -> NodePlan:
    """Return the plan for the nodes of the pool, which `views` contains.

    Args:
        runs: Faults that training runs have seen since this process began, by node.
        clock: The error of this process's clock; `now_s` is already correct, unless the error is doubtful.
    """
    asked = tuple(
        each for name in sorted(views) if (each := _of_operator(nodes[name], views[name], now_s)) is not None
    )
    after = {each.node: each.after for each in asked}
    seen = {
        name: transition.with_run_faults(after.get(name, view), runs[name], now_s)
        if runs.get(name)
        else after.get(name, view)
        for name, view in views.items()
    }
    doubt = clock.why if clock.is_doubtful else ""
    pool = PoolView(now_s, tuple(seen[name] for name in sorted(seen)), doubt, clock.is_checked)
    decided = decide(pool, policy)
    holds = tuple(each for each in decided if isinstance(each, Hold))
    if clock.why:
        holds = (*holds, Hold("", clock.why, alert=True))
    # Write an operator's change before deciding anything that depends on it.
    actions = [each for each in decided if not isinstance(each, Hold) and each.node not in after]
    writes = () if is_dry else tuple(_of_action(each, seen, now_s, policy) for each in actions)
    noted = () if is_dry else tuple(_run_faults(views, seen, {*after, *(each.node for each in actions)}))
    return NodePlan(
        (*asked, *writes, *noted),
        holds,
        tuple(actions) if is_dry else (),
        tuple(_draining(nodes, pool, is_dry)),
        pool,
        breaker.assess(len(pool.nodes), pool.nodes, policy),
    )


# -- operators


def _of_operator(node: KnownNode, view: NodeView, now_s: float) -> NodeWrite | None:
    """Return the write for what an operator has done or requested; None if there is nothing to write."""
    request = node.request
    name = request.by if request is not None else ""
    note, who = DecisionNote(f"{OPERATOR} {name}".rstrip(), ""), f"an operator{f' ({name})' if name else ''}"
    if request is not None and request.refused:
        return NodeWrite(node.name, REFUSED, request.refused, view) if not view.refused else None
    if request is not None and request.kind == "release":
        why = f"{who} has released it"
        return _released(node, view, why, replace(note, why=why), now_s)
    if request is not None:
        view = _readable(view)
        why = f"{who} has taken it out: {request.why}"
        after = transition.quarantined_by_operator(view, request.why, now_s, drain=request.drain)
        return NodeWrite(node.name, OPERATOR_TOOK, why, after, replace(note, why=why))
    if view.refused and not view.quarantine:
        return None  # the content of the record is unknown
    if view.quarantine is not None and not node.is_tainted:
        return _released(node, view, _BY_HAND, replace(note, why=_BY_HAND), now_s)
    if view.quarantine is None and node.is_tainted:
        after = transition.quarantined_by_operator(view, _SET_BY_HAND, now_s)
        return NodeWrite(node.name, OPERATOR_TOOK, _SET_BY_HAND, after, replace(note, why=_SET_BY_HAND))
    return None


def _released(node: KnownNode, view: NodeView, why: str, note: DecisionNote, now_s: float) -> NodeWrite:
    view = _readable(view)
    if view.quarantine is None:
        return NodeWrite(node.name, OPERATOR_RELEASED, f"{why}, but it was not quarantined", view)
    after = transition.released_by_operator(view, now_s)
    if after.waiver is not None and not after.waiver.boot_id:  # no report has been heard yet
        after = replace(after, waiver=replace(after.waiver, boot_id=node.boot_id))
    return NodeWrite(node.name, OPERATOR_RELEASED, why, after, note)


def _readable(view: NodeView) -> NodeView:
    """Return a view that can be stored: an operator's request replaces a record that cannot be read."""
    return view if view.quarantine is not None else replace(view, refused="")


# -- decisions


def _of_action(
    action: QuarantineAction, views: Mapping[str, NodeView], now_s: float, policy: NodePolicy
) -> NodeWrite:
    view = views[action.node]
    after = transition.after(view, action, now_s, policy)
    note = None if isinstance(action, (Refresh, Forget)) else DecisionNote(HOLDFAST, action.why)
    return NodeWrite(action.node, kind_of(action, view), action.why, after, note)


def kind_of(action: QuarantineAction, view: NodeView) -> str:
    """Return the kind of the write that carries out an action."""
    if isinstance(action, Taint):
        if action.effect != NO_NEW_WORK:
            return AVOIDED
        return UPDATED if breaker.is_tainted(view) else TAINTED
    if isinstance(action, Drain):
        return DRAINED
    if isinstance(action, Release):
        return RELEASED
    return FORGOTTEN if isinstance(action, Forget) else REFRESHED


def _run_faults(
    views: Mapping[str, NodeView], seen: Mapping[str, NodeView], others: set[str]
) -> Iterator[NodeWrite]:
    """Yield writes that store the faults seen by runs, because the next leader needs them as evidence."""
    for name in sorted(views):
        if name not in others and not views[name].refused and seen[name].runs != views[name].runs:
            why = "a training run has seen a fault of this node"
            yield NodeWrite(name, RUN_FAULTS, why, seen[name])


def _draining(nodes: Mapping[str, KnownNode], pool: PoolView, is_dry: bool) -> Iterator[tuple[str, str]]:
    """Yield the nodes whose drain is recorded on the Node. A dry run continues only operators' drains."""
    for view in pool.nodes:
        stored, held = nodes[view.name].view.quarantine, view.quarantine
        if held is None or stored is None or stored.drain_at_s is None or held.effect != NO_NEW_WORK:
            continue
        if nodes[view.name].is_tainted and (not is_dry or OPERATOR in held.sources):
            yield view.name, nodes[view.name].last_decision.get("why", "")
