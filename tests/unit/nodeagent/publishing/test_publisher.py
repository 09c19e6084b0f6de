from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from nodeagent.agent.agent import Agent, Published
from nodeagent.agent.saved_state import SavedState
from nodeagent.policy import loading
from nodeagent.publishing import publisher
from nodeagent.publishing.node_object import NotWritten
from nodeagent.publishing.publisher import NodePublisher, PublishingMetrics, verdict_of
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.server.http_api import SILENT_S
from tests.unit.nodeagent.publishing.states import ABOUT, SENSORS, finding, published, sensor

PATIENCE_S = 20.0
HEALTHY = "'reason': 'Healthy'"


class SteppedClock(Clock):
    """A clock that changes only when it is set."""

    def __init__(self) -> None:
        super().__init__(Anchor("a boot", 0.0))
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


class Desk:
    """A publisher of an agent whose loop does not run, and what it has written."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.agent = Agent(loading.load(), self.clock, SavedState(), None, lambda _: None)
        self.written: list[Mapping[str, Any]] = []
        self.notes: list[Mapping[str, Any]] = []
        self.refusal: NotWritten | None = None
        self.changed = threading.Condition()
        self.publisher = NodePublisher(self.agent, lambda: ABOUT, self.write, self.notes.append)

    def write(self, patch: Mapping[str, Any], wait_s: float) -> NotWritten | None:
        with self.changed:
            self.written.append(patch)
            self.changed.notify_all()
        return self.refusal

    def publish(self, state: Published) -> None:
        with self.agent.looked:
            self.agent.published = state
            self.agent.looked.notify_all()

    def until(self, reason: str, holds: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(reason in str(each) and holds(each) for each in self.written), PATIENCE_S
            ), self.written


@contextmanager
def desk(refusal: NotWritten | None = None) -> Iterator[Desk]:
    made = Desk()
    made.refusal = refusal
    made.publisher.start()
    try:
        yield made
    finally:
        made.publisher.stop(PATIENCE_S)


def test_it_publishes_the_start_a_change_and_the_end() -> None:
    with desk() as room:
        room.until("AgentStarting")
        room.publish(published())
        room.until(HEALTHY, lambda patch: "metadata" in patch)
        room.publish(published(finding()))
        room.until("Xid79", lambda patch: "metadata" in patch)
    assert "AgentStopped" in str(room.written[-1])
    assert "metadata" not in room.written[-1]


def test_an_agent_whose_loop_does_not_run_is_not_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process lives and writes, but what it has published is old."""
    monkeypatch.setattr(publisher, "LOOK_S", 0.05)
    with desk() as room:
        room.publish(published(at_s=100.0))
        room.until(HEALTHY, lambda patch: "metadata" in patch)
        room.clock.at_s = 100.0 + SILENT_S + 1.0
        room.until("AgentSilent", lambda patch: "metadata" not in patch)


def test_the_end_is_published_also_after_a_failure_and_the_log_has_one_line() -> None:
    with desk(NotWritten("403", "no")) as room:
        room.publish(published())
        room.until(HEALTHY)
    assert "AgentStopped" in str(room.written[-1])
    assert [each["event"] for each in room.notes] == ["publishing_failed"]


def test_the_metrics_have_the_age_of_the_last_write() -> None:
    registry = CollectorRegistry()
    with desk() as room:
        registry.register(PublishingMetrics(room.publisher))
        room.publish(published())
        room.until(HEALTHY, lambda patch: "metadata" in patch)
    text = generate_latest(registry).decode()
    assert "holdfast_node_publishing_failures_total 0.0" in text
    (age,) = (line for line in text.splitlines() if line.startswith("holdfast_node_publishing_age_seconds "))
    assert 0.0 <= float(age.split()[1]) < PATIENCE_S


def test_what_is_a_change_of_the_verdict() -> None:
    def verdict(*found: Any, **more: Any) -> Any:
        return verdict_of((), published(*found, **more))

    same = verdict(finding(since_s=1.0), at_s=1.0)
    assert same == verdict(finding(since_s=2.0, why="other words"), at_s=2.0)
    for other in (
        verdict(),
        verdict(finding(code=48)),
        verdict(finding(), finding(code=48)),
        verdict(finding(lasting=True)),
        verdict(finding(sources=("kmsg", "nvml-events"))),
        verdict(finding(), released=True),
        verdict(finding(), sensors=(*SENSORS[1:], sensor("nvml-events", "no driver"))),
    ):
        assert other != same
