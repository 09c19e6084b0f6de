from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.events import EventRecorder
from supervisor.nodes import announcements
from supervisor.nodes.announcements import ALERTS_METRIC, NODES_METRIC, STATES, Announcer
from supervisor.nodes.plan import KINDS, SILENT
from supervisor.nodes.verdicts import VerdictSwaps
from tests.unit.literals import ROOT
from tests.unit.supervisor.nodes.node_samples import XID, NodesInMemory, PlayedLeader, healthy_pool, heard_by

LIMIT_S = 10.0
NO_SWAPS = VerdictSwaps()


class WrittenEvents:
    """Accepts events, as the API server does."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str, str]] = []  # node, reason, message

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        self.written.append((body["involvedObject"]["name"], body["reason"], body["message"]))
        return body

    async def patch(
        self, kind: ResourceKind, name: str, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        raise AssertionError(f"the event {body} is announced twice")


async def announced(
    nodes: NodesInMemory,
    leader: PlayedLeader,
    awaited: tuple[str, ...] = (),
    swaps: VerdictSwaps = NO_SWAPS,
) -> list[tuple[str, str, str]]:
    """Announce the same state in three rounds, some seconds apart, and return the events."""
    sink = WrittenEvents()
    events = EventRecorder(sink, "holdfast-supervisor", "pod")
    running = asyncio.ensure_future(events.run())
    announcer = Announcer(events)
    for at in range(3):
        nodes.now_s += 7.0
        leader.hear(1.0 + at)
        known = {name: nodes.known(name) for name in nodes.objects}
        found = leader.plan(1.0 + at)
        announcer.planned(found, known, awaited, leader.policy, swaps, is_dry=bool(found.dry))
    assert await events.flush(LIMIT_S)
    running.cancel()
    await asyncio.wait({running})
    return sink.written


async def test_a_quiet_pool_announces_nothing() -> None:
    nodes, leader = healthy_pool("a", "b")
    assert await announced(nodes, leader) == []
    assert NODES_METRIC.labels("healthy")._value.get() == 2


async def test_an_action_of_a_dry_run_is_announced_once_though_its_numbers_change() -> None:
    nodes, _ = healthy_pool("a", "b", "c")
    leader = heard_by(PlayedLeader(nodes, is_dry=True), nodes)
    nodes.report("a", XID)
    [(name, reason, text)] = await announced(nodes, leader)
    assert (name, reason) == ("a", "QuarantineDryRun")
    assert text.startswith("dry run: Holdfast would taint this node: GPU-1 xid 79 reboot_node")


async def test_a_verdict_that_moves_nobody_is_announced_once_with_the_reason() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    swaps = VerdictSwaps(
        frozenset({"c"}), {"a": "GPU 3 is lost; its members stay: a storm"}, {"b": "too hot"}
    )
    said = await announced(nodes, leader, swaps=swaps)
    assert said == [
        ("a", "VerdictHeld", "GPU 3 is lost; its members stay: a storm"),
        (
            "b",
            "VerdictDryRun",
            "dry run: Holdfast would move the members of jobs on this node to standbys: too hot",
        ),
    ]
    shown = [announcements.VERDICTS_METRIC.labels(each)._value.get() for each in ("moves", "held")]
    assert shown == [1, 2]


async def test_a_verdict_that_has_been_held_for_long_is_an_alert() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    why = "GPU 3 is lost; its members stay: a storm"
    found = await announced(nodes, leader, swaps=VerdictSwaps(held={"a": why}, alerts=frozenset({"a"})))
    assert sorted(found) == [("a", "QuarantineAlert", why), ("a", "VerdictHeld", why)]
    assert ALERTS_METRIC._value.get() == 1


async def test_an_alert_is_announced_once_but_not_for_a_node_that_is_only_awaited() -> None:
    nodes, _ = healthy_pool("a", "b")
    late = PlayedLeader(nodes)
    said = await announced(nodes, late)
    assert [each[:2] for each in said] == [("a", "QuarantineAlert"), ("b", "QuarantineAlert")]
    assert ALERTS_METRIC._value.get() == 2
    assert await announced(nodes, late, awaited=("a", "b")) == []
    assert ALERTS_METRIC._value.get() == 0


async def test_a_change_is_announced_on_the_node_and_counted() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    nodes.report("a", XID)
    leader.hear(1.0)
    [write] = leader.plan(1.0).writes
    sink = WrittenEvents()
    events = EventRecorder(sink, "holdfast-supervisor", "pod")
    running = asyncio.ensure_future(events.run())
    counter = announcements.WRITES_METRIC.labels("taint")._value
    before = counter.get()
    Announcer(events).wrote(nodes.known("a"), write)
    assert await events.flush(LIMIT_S)
    running.cancel()
    await asyncio.wait({running})
    [(name, reason, text)] = sink.written
    assert (name, reason, text) == ("a", "Quarantined", write.why)
    assert counter.get() == before + 1


def test_every_kind_that_people_should_know_has_a_reason() -> None:
    assert {*announcements.REASONS, *SILENT} == {*KINDS}


@pytest.mark.parametrize("metric", announcements.METRICS, ids=lambda metric: metric._name)
def test_the_documentation_lists_every_metric_with_its_states(metric: Any) -> None:
    text = (ROOT / "docs" / "quarantine.md").read_text()
    labels = f"{{{','.join(metric._labelnames)}}}" if metric._labelnames else ""
    suffix = "_total" if metric._type == "counter" else ""
    assert f"`{metric._name}{suffix}{labels}`" in text
    for state in STATES:
        assert f"`{state}`" in text
