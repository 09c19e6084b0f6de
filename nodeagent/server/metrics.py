"""The agent's metrics, built from the published state at each scrape.

The number of metrics is bounded by the hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nodeagent.agent.agent import Published
from nodeagent.model import DRIVER, NODE, Action, HealthVerdict, Level, word
from nodeagent.server.report import worst

MAX_ENTITIES = 512  # one label each; a node has about a hundred
# If there are more, entities of these kinds come first, because they decide whether the node can train.
_FIRST = ("gpu", DRIVER, NODE)


class NodeMetrics(Collector):
    """Collects the metrics from `published` at each scrape."""

    def __init__(self, published: Callable[[], Published], started_s: float | None = None) -> None:
        self._published = published
        self._started_s = time.time() if started_s is None else started_s

    def collect(self) -> Iterable[Metric]:
        now = self._published()
        level, action = worst(now.verdicts)
        yield _gauge("level", "Level of the node: 0 healthy, 1 degraded, 2 unhealthy.", level)
        wanted = GaugeMetricFamily("holdfast_node_action", "1 for the action to take.", labels=["action"])
        for each in Action:
            wanted.add_metric([word(each)], float(each == action))
        yield wanted
        yield from self._entities(now)
        yield from self._sensors(now)
        lost = "Observations and evidence lost because a queue was full or there was no room for more."
        yield _count("dropped", lost, now.dropped)
        last = now.events[-1]["seq"] if now.events else 0
        yield _count(
            "changes", "Changes of findings (raised, worse, better, cleared) since the first start.", last
        )
        yield _gauge(
            "released", "1 while an operator has released the GPUs.", float(now.released is not None)
        )
        yield _gauge("problems", "Problems of the agent itself, as the report lists them.", len(now.problems))
        yield _gauge(
            "policy_rejected",
            "1 while the policy file has a mistake and the last good policy is in force.",
            now.policy_rejected,
        )
        yield _gauge("look_time_seconds", "Agent time of the last cycle.", now.at_s)
        yield _gauge("start_time_seconds", "Start time of the agent, in seconds since 1970.", self._started_s)

    def _entities(self, now: Published) -> Iterable[Metric]:
        levels = GaugeMetricFamily(
            "holdfast_node_entity_level",
            "Level of the entity: 0 healthy, 1 degraded, 2 unhealthy.",
            labels=["entity"],
        )
        findings = GaugeMetricFamily(
            "holdfast_node_finding",
            "1 for each active finding.",
            labels=["entity", "check", "code", "level"],
        )
        for verdict in shown(now.verdicts):
            levels.add_metric([verdict.entity], float(verdict.level))
            for each in verdict.findings:
                code = "" if each.code is None else str(each.code)
                findings.add_metric([verdict.entity, each.check, code, word(each.level)], 1.0)
        totals = GaugeMetricFamily("holdfast_node_entities", "Number of entities by level.", labels=["level"])
        for level in Level:
            totals.add_metric([word(level)], float(sum(v.level == level for v in now.verdicts)))
        yield from (levels, findings, totals)

    def _sensors(self, now: Published) -> Iterable[Metric]:
        sees = GaugeMetricFamily(
            "holdfast_node_sensor_sees",
            "1 while the sensor can measure, 0 while it is blind.",
            labels=["sensor"],
        )
        calls = CounterMetricFamily("holdfast_node_sensor_calls", "Calls that returned.", labels=["sensor"])
        seen = CounterMetricFamily(
            "holdfast_node_sensor_observations", "Observations made by the sensor.", labels=["sensor"]
        )
        call = GaugeMetricFamily(
            "holdfast_node_sensor_call_seconds",
            "Duration of the current or last call.",
            labels=["sensor"],
        )
        for each in now.sensors:
            sees.add_metric([each.name], float(each.sees))
            calls.add_metric([each.name], each.calls)
            seen.add_metric([each.name], each.observations)
            call.add_metric([each.name], each.call_s)
        yield from (sees, calls, seen, call)


def shown(verdicts: Iterable[HealthVerdict]) -> list[HealthVerdict]:
    """Return at most `MAX_ENTITIES` verdicts: GPUs, driver and node first, and the worst of each first."""

    def rank(verdict: HealthVerdict) -> tuple[bool, int, str]:
        return verdict.entity.partition("/")[0] not in _FIRST, -verdict.level, verdict.entity

    return sorted(verdicts, key=rank)[:MAX_ENTITIES]


def registry(published: Callable[[], Published]) -> CollectorRegistry:
    """Return a registry with only the agent's metrics."""
    made = CollectorRegistry()
    made.register(NodeMetrics(published))
    return made


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"holdfast_node_{name}", text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"holdfast_node_{name}", text, value=value)
