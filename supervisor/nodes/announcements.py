"""Announce decisions as Events, log lines and metrics: each decision once, not in every round."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Counter as MetricCounter
from prometheus_client import Gauge

from holdfast.node_report import DEGRADED, UNHEALTHY
from supervisor.admission import pod_layout
from supervisor.kubernetes.events import EventRecorder, EventType, ObjectReference
from supervisor.nodes import plan as planning
from supervisor.nodes.node_objects import KnownNode
from supervisor.nodes.plan import KINDS, NodePlan, NodeWrite
from supervisor.nodes.verdicts import VerdictSwaps
from supervisor.quarantine import breaker
from supervisor.quarantine.model import NodePolicy, NodeView

log = logging.getLogger(__name__)

STATES = ("healthy", "degraded", "unhealthy", "quarantined", "out_by_others", "unknown")
NODES_METRIC = Gauge(
    "holdfast_quarantine_nodes", "Nodes with an agent, by state; each is in exactly one.", ("state",)
)
ALLOWED_METRIC = Gauge("holdfast_quarantine_allowed_nodes", "The number of nodes that may be out of service.")
ALERTS_METRIC = Gauge("holdfast_quarantine_alerts", "Nodes that need an operator.")
DRY_METRIC = Gauge("holdfast_quarantine_dry_run", "1 while actions are only announced.")
WRITES_METRIC = MetricCounter("holdfast_quarantine_writes", "Changes of nodes, by kind.", ("kind",))
RESULTS = ("moves", "held")
VERDICTS_METRIC = Gauge(
    "holdfast_quarantine_verdicts",
    "Nodes whose agents report a fault: members move, or are held.",
    ("result",),
)
METRICS = (NODES_METRIC, ALLOWED_METRIC, ALERTS_METRIC, DRY_METRIC, WRITES_METRIC, VERDICTS_METRIC)
# The event's reason, and whether it is a warning, for each kind of write that people should know about
REASONS: Mapping[str, tuple[str, EventType]] = {
    planning.TAINTED: ("Quarantined", "Warning"),
    planning.UPDATED: ("QuarantineExtended", "Warning"),
    planning.AVOIDED: ("Avoided", "Normal"),
    planning.DRAINED: ("Draining", "Warning"),
    planning.RELEASED: ("Released", "Normal"),
    planning.FORGOTTEN: ("WaiverEnded", "Normal"),
    planning.OPERATOR_TOOK: ("QuarantinedByOperator", "Warning"),
    planning.OPERATOR_RELEASED: ("ReleasedByOperator", "Normal"),
    planning.REFUSED: ("RequestRefused", "Warning"),
}
DRY_RUN, ALERT = "QuarantineDryRun", "QuarantineAlert"
VERDICT_HELD, VERDICT_DRY_RUN = "VerdictHeld", "VerdictDryRun"
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_POOL = ObjectReference("apps/v1", "Deployment", pod_layout.NAMESPACE, pod_layout.SUPERVISOR_SERVICE, "")


class Announcer:
    """Records Events on the Nodes. A state that lasts for hours is announced only when it begins."""

    def __init__(self, events: EventRecorder) -> None:
        self._events = events
        self._said: dict[tuple[str, str], str] = {}  # the text without its numbers, by node and reason
        for kind in KINDS:
            WRITES_METRIC.labels(kind)

    def wrote(self, node: KnownNode, write: NodeWrite) -> None:
        """Announce a change that the API server has accepted."""
        WRITES_METRIC.labels(write.kind).inc()
        if write.is_silent:
            return
        reason, level = REASONS[write.kind]
        log.warning("node changed", extra={"changed_node": node.name, "kind": write.kind, "why": write.why})
        self._events.record(_reference(node), reason, write.why, level)

    def planned(
        self,
        plan: NodePlan,
        nodes: Mapping[str, KnownNode],
        awaited: Iterable[str],
        policy: NodePolicy,
        swaps: VerdictSwaps,
        *,
        is_dry: bool,
    ) -> None:
        """Announce alerts, verdicts that move no members and, in a dry run, actions.

        `awaited` contains the nodes whose silence is expected, because this process has just started.
        """
        views = {each.name: each for each in plan.pool.nodes}
        hushed = {*awaited}
        now: dict[tuple[str, str], str] = {}
        for each in plan.dry:
            kind = planning.kind_of(each, views[each.node])
            if kind != planning.REFRESHED:
                now[each.node, DRY_RUN] = f"dry run: Holdfast would {kind} this node: {each.why}"
        for hold in plan.holds:
            if hold.alert and hold.node not in hushed:
                now[hold.node, ALERT] = hold.why
        for name, why in swaps.held.items():
            now[name, VERDICT_HELD] = why
            if name in swaps.alerts:
                now.setdefault((name, ALERT), why)
        for name, why in swaps.would.items():
            now[name, VERDICT_DRY_RUN] = (
                f"dry run: Holdfast would move the members of jobs on this node to standbys: {why}"
            )
        for (name, reason), text in now.items():
            if self._said.get((name, reason)) != _NUMBER.sub("#", text):
                self._say(nodes.get(name), reason, text)
        self._said = {key: _NUMBER.sub("#", text) for key, text in now.items()}
        _measure(plan, policy, sum(reason == ALERT for _, reason in now), is_dry)
        VERDICTS_METRIC.labels("moves").set(len(swaps.moving))
        VERDICTS_METRIC.labels("held").set(len(swaps.held) + len(swaps.would))

    def warn(self, reference: ObjectReference, reason: str, text: str) -> None:
        """Announce a problem. The caller must call this only once for each problem."""
        log.warning("quarantine", extra={"about": reference.name, "reason": reason, "why": text})
        self._events.record(reference, reason, text, "Warning")

    def about(self, node: KnownNode, reason: str, text: str, level: EventType = "Normal") -> None:
        log.info("quarantine", extra={"about": node.name, "reason": reason, "why": text})
        self._events.record(_reference(node), reason, text, level)

    def _say(self, node: KnownNode | None, reason: str, text: str) -> None:
        self.warn(_POOL if node is None else _reference(node), reason, text)


def _reference(node: KnownNode) -> ObjectReference:
    return ObjectReference("v1", "Node", "", node.name, node.uid)


def state_of(node: NodeView, policy: NodePolicy) -> str:
    """Return the state of a node, as the metric counts it."""
    if breaker.is_tainted(node):
        return "quarantined"
    if breaker.is_out(node):
        return "out_by_others"
    if node.report is None or breaker.is_unknown(node, policy):
        return "unknown"
    levels = {each.level for each in node.report.findings}
    return "unhealthy" if UNHEALTHY in levels else "degraded" if DEGRADED in levels else "healthy"


def _measure(plan: NodePlan, policy: NodePolicy, alerts: int, is_dry: bool) -> None:
    counts = Counter(_states(plan, policy))
    for state in STATES:
        NODES_METRIC.labels(state).set(counts[state])
    ALLOWED_METRIC.set(plan.breaker.allowed)
    ALERTS_METRIC.set(alerts)
    DRY_METRIC.set(is_dry)


def _states(plan: NodePlan, policy: NodePolicy) -> Iterator[str]:
    for node in plan.pool.nodes:
        yield state_of(node, policy)
