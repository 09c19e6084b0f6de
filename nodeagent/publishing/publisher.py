"""Publishes the agent's state in a separate thread, which never delays the agent.

The thread waits for the agent's cycles. It writes after a change of the verdict, as a heartbeat, and again
after a failure: see `schedule`. When it is stopped, it reports that the node is no longer monitored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nodeagent.agent.agent import LOOK_S, Agent, Note, Published
from nodeagent.publishing import conditions
from nodeagent.publishing.conditions import NodeCondition
from nodeagent.publishing.evidence import compact
from nodeagent.publishing.node_object import WAIT_S, NotWritten
from nodeagent.publishing.node_patch import Transitions, node_patch
from nodeagent.publishing.schedule import SOON_S, WriteSchedule
from nodeagent.server import report
from nodeagent.server.http_api import SILENT_S

END_S = 1.0  # the limit on the last write; the agent ends within 2 s of SIGTERM

# the patch, the limit on each wait in seconds
Write = Callable[[Mapping[str, Any], float], NotWritten | None]


@dataclass(frozen=True, slots=True)
class PublishingStatus:
    """What the metrics show."""

    started_s: float  # monotonic
    written_s: float | None = None  # monotonic, of the last successful write
    writes: int = 0
    failures: int = 0


@dataclass(slots=True)
class NodePublisher:
    """Publishes the state of an agent until `stop`."""

    agent: Agent
    about: Callable[[], Mapping[str, Any]]
    write: Write
    note: Callable[[Note], None]
    status: PublishingStatus = field(init=False)
    _schedule: WriteSchedule = field(init=False, default_factory=WriteSchedule)
    _transitions: Transitions = field(init=False, default_factory=Transitions)
    _ending: threading.Event = field(init=False, default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)
    _failing: tuple[str, float] | None = field(init=False, default=None)  # the kind, and since when

    def __post_init__(self) -> None:
        self.status = PublishingStatus(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float = END_S) -> None:
        """Publish that the agent has stopped; give up after `within_s` seconds."""
        self._ending.set()
        with self.agent.looked:
            self.agent.looked.notify_all()
        self._thread.join(within_s)

    def _run(self) -> None:
        while not self._ending.is_set():
            published = self.agent.published
            found, is_whole = self._judge(published)
            verdict = verdict_of(found, published)
            wait_s = self._schedule.due_s(verdict) - time.monotonic()
            if wait_s <= 0:
                self._publish(found, published if is_whole else None, verdict)
            elif not self._ending.wait(min(wait_s, SOON_S)):
                self._wait_for_another(published, wait_s - SOON_S)
        self._put(conditions.stopped(), None, END_S)

    def _wait_for_another(self, published: Published, wait_s: float) -> None:
        """Wait for the agent's next cycle, for at most `wait_s`."""
        with self.agent.looked:
            self.agent.looked.wait_for(
                lambda: self.agent.published is not published or self._ending.is_set(),
                max(0.0, min(wait_s, LOOK_S)),  # without a cycle, the agent may have gone silent
            )

    def _judge(self, published: Published) -> tuple[tuple[NodeCondition, ...], bool]:
        """Return the conditions, and whether the state is a report that others may rely on."""
        if not published.ready:
            return conditions.starting(), False
        if self.agent.clock.now_s() - published.at_s > SILENT_S:
            return conditions.silent(SILENT_S), False
        return conditions.conditions(published), True

    def _publish(
        self, found: Iterable[NodeCondition], published: Published | None, verdict: Hashable
    ) -> None:
        began_s = time.monotonic()
        text = None if published is None else compact(report.health_report(published, self.about()))
        failed = self._put(found, text, WAIT_S)
        if failed is None:
            self._schedule = self._schedule.succeeded(verdict, began_s)
            self.status = replace(self.status, written_s=time.monotonic(), writes=self.status.writes + 1)
        else:
            self._schedule = self._schedule.failed(time.monotonic(), failed.wait_s)
            self.status = replace(self.status, failures=self.status.failures + 1)
        self._tell(failed)

    def _put(self, found: Iterable[NodeCondition], text: str | None, wait_s: float) -> NotWritten | None:
        wall_s = time.time()
        found = tuple(found)
        transitions = self._transitions.after(found, wall_s)
        failed = self.write(node_patch(found, transitions, wall_s, text), wait_s)
        if failed is None:
            self._transitions = transitions
        return failed

    def _tell(self, failed: NotWritten | None) -> None:
        """Log when publishing begins to fail, when it fails in another way, and when it works again."""
        now = time.monotonic()
        if failed is None:
            if self._failing is not None:
                self.note({"event": "publishing_resumed", "failed_for_s": round(now - self._failing[1], 1)})
            self._failing = None
        elif self._failing is None or self._failing[0] != failed.kind:
            since = now if self._failing is None else self._failing[1]
            self._failing = failed.kind, since
            self.note({"event": "publishing_failed", "why": failed.why})


def verdict_of(found: Iterable[NodeCondition], published: Published) -> Hashable:
    """Return what is written at once if it changes: everything but times and measured values."""
    return (
        tuple((each.type, each.status, each.reason) for each in found),
        frozenset(
            (
                each.entity, each.check, each.code, each.level, each.action, each.sources, each.origins,
                each.device, each.lasting, each.remedy, each.overridden,
            )
            for verdict in published.verdicts
            for each in verdict.findings
        ),
        tuple(each.name for each in published.sensors if not each.sees),
        published.released is None,
    )  # fmt: skip


class PublishingMetrics(Collector):
    """Collects the metrics of a publisher at each scrape."""

    def __init__(self, publisher: NodePublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterable[Metric]:
        now = self._publisher.status
        since = now.started_s if now.written_s is None else now.written_s
        yield GaugeMetricFamily(
            "holdfast_node_publishing_age_seconds",
            "Time since the Node object was last written; since the start, if it never was.",
            value=time.monotonic() - since,
        )
        yield CounterMetricFamily(
            "holdfast_node_publishing_writes", "Successful writes of the Node object.", value=now.writes
        )
        yield CounterMetricFamily(
            "holdfast_node_publishing_failures", "Failed writes of the Node object.", value=now.failures
        )
