"""Events are written soon, counted instead of repeated, and never block the caller; in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.process import event_loop
from supervisor.kubernetes import events
from supervisor.kubernetes.errors import Forbidden
from supervisor.kubernetes.events import EventRecorder, ObjectReference
from tests.unit.supervisor.cluster.api_server import ServedObjects
from tests.unit.supervisor.kubernetes.object_store import LOST_ANSWER, LOST_REQUEST, ObjectStore
from tests.unit.supervisor.kubernetes.simulated_time import simulated

JOB = ObjectReference("holdfast.dev/v1alpha1", "Supervision", "team", "job", "uid-1")
NODE = ObjectReference("v1", "Node", "", "node1", "uid-2")


@asynccontextmanager
async def recording(store: ObjectStore) -> AsyncIterator[EventRecorder]:
    recorder = EventRecorder(store, "holdfast-supervisor", "pod-1")
    running = asyncio.ensure_future(recorder.run())
    yield recorder
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def written(store: ObjectStore) -> list[dict[str, Any]]:
    return [each for (plural, _, _), each in store.objects.items() if plural == "events"]


@simulated
async def test_an_event_states_what_happened_to_which_object() -> None:
    store = ObjectStore()
    async with recording(store) as recorder:
        recorder.record(JOB, "Restarted", "rank 3 was killed", "Warning")
        assert await recorder.flush(1)
    (found,) = written(store)
    assert found["involvedObject"] == {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Supervision",
        "namespace": "team",
        "name": "job",
        "uid": "uid-1",
    }
    assert (found["reason"], found["message"], found["type"]) == ("Restarted", "rank 3 was killed", "Warning")
    assert (found["count"], found["reportingInstance"]) == (1, "pod-1")
    assert found["metadata"]["namespace"] == "team"
    assert found["metadata"]["name"].startswith("job.")


@simulated
async def test_an_event_about_a_node_is_in_the_default_namespace() -> None:
    store = ObjectStore()
    async with recording(store) as recorder:
        recorder.record(NODE, "Quarantined", "Xid 79")
        await recorder.flush(1)
    (found,) = written(store)
    assert found["metadata"]["namespace"] == "default"
    assert "namespace" not in found["involvedObject"]


@simulated
async def test_repetitions_within_ten_minutes_are_one_event_with_a_count_and_the_newest_message() -> None:
    store = ObjectStore()
    async with recording(store) as recorder:
        for n in range(5):
            recorder.record(JOB, "Restarted", f"fault {n}")
            await asyncio.sleep(300)
        recorder.record(JOB, "Finished", "done")
        recorder.record(JOB, "Restarted", "as a warning", "Warning")
        await asyncio.sleep(600)
        recorder.record(JOB, "Restarted", "much later")
        await recorder.flush(1)
    found = [(each["reason"], each["count"], each["message"]) for each in written(store)]
    assert found == [
        ("Restarted", 5, "fault 4"),
        ("Finished", 1, "done"),
        ("Restarted", 1, "as a warning"),
        ("Restarted", 1, "much later"),
    ]


@simulated
async def test_a_burst_is_one_request() -> None:
    store = ObjectStore()
    async with recording(store) as recorder:
        for n in range(1000):
            recorder.record(JOB, "Restarted", f"fault {n}")
        await recorder.flush(1)
    assert len(store.writes) == 1
    assert [each["count"] for each in written(store)] == [1000]


@simulated
async def test_events_recorded_during_a_request_are_written_by_the_next_one() -> None:
    store = ObjectStore()
    store.faults = [10.0]
    async with recording(store) as recorder:
        recorder.record(JOB, "Restarted", "one")
        await asyncio.sleep(1)
        recorder.record(JOB, "Restarted", "two")
        assert not await recorder.flush(1)
        assert await recorder.flush(20)
    assert [(each["count"], each["message"]) for each in written(store)] == [(2, "two")]


@pytest.mark.parametrize("fault", [LOST_REQUEST, LOST_ANSWER])
@simulated
async def test_while_the_server_is_away_events_wait_and_are_written_once(fault: str) -> None:
    store = ObjectStore()
    store.faults = [fault] * 20
    async with recording(store) as recorder:
        recorder.record(JOB, "Restarted", "one")
        recorder.record(NODE, "Quarantined", "two")
        await asyncio.sleep(30)
        recorder.record(JOB, "Restarted", "three")
        assert await recorder.flush(1000)
    assert sorted((each["count"], each["message"]) for each in written(store)) == [(1, "two"), (2, "three")]
    assert recorder.dropped == 0


@simulated
async def test_an_event_that_the_server_has_forgotten_is_written_again() -> None:
    store = ObjectStore()
    async with recording(store) as recorder:
        recorder.record(JOB, "Restarted", "one")
        await recorder.flush(1)
        store.objects.clear()
        recorder.record(JOB, "Restarted", "two")
        await recorder.flush(1)
    assert [(each["count"], each["message"]) for each in written(store)] == [(2, "two")]


@simulated
async def test_a_refused_event_is_dropped_and_the_next_one_is_written() -> None:
    store = ObjectStore()
    store.faults = [Forbidden("POST events", "the namespace is being terminated", 403)]
    async with recording(store) as recorder:
        recorder.record(JOB, "Restarted", "one")
        recorder.record(NODE, "Quarantined", "two")
        assert await recorder.flush(1)
    assert [each["message"] for each in written(store)] == ["two"]
    assert recorder.dropped == 1


@simulated
async def test_one_event_that_cannot_be_written_does_not_delay_the_others() -> None:
    store = ObjectStore()
    store.faults = [LOST_REQUEST]
    async with recording(store) as recorder:
        recorder.record(JOB, "Restarted", "one")
        recorder.record(NODE, "Quarantined", "two")
        await recorder.flush(60)
    assert [each["message"] for each in written(store)] == ["two", "one"]


@pytest.mark.parametrize(
    ("namespace", "name", "times"),
    [("..", "x", 1), (".", "x", 1), ("\ud800", "x", 1), ("team", "\ud800", 2)],
)
async def test_an_event_that_no_request_can_contain_is_dropped_and_the_next_one_is_written(
    namespace: str, name: str, times: int
) -> None:
    served = ServedObjects()
    async with served.serving() as server:
        recorder = EventRecorder(server, "holdfast-supervisor", "pod-1")
        running = asyncio.create_task(recorder.run())
        for _ in range(times):
            recorder.record(ObjectReference("v1", "Pod", namespace, name, ""), "Lost", "gone")
            assert await recorder.flush(10)
        recorder.record(JOB, "Restarted", "rank 3 was killed")
        assert await recorder.flush(10)
        assert "rank 3 was killed" in [each["message"] for each in served.events]
        assert recorder.dropped == 1
        await event_loop.end([running])


def about(n: int, namespace: str = "team") -> ObjectReference:
    return ObjectReference("v1", "Pod", namespace, f"pod-{n}", f"uid-{n}")


@simulated
async def test_the_events_of_one_namespace_neither_displace_nor_delay_those_of_another() -> None:
    store = ObjectStore()
    recorder = EventRecorder(store, "x", "y")
    recorder.record(about(0, "other"), "Lost", "gone")
    for n in range(events.WAITING + 10):
        recorder.record(about(n), "Lost", "gone")
    recorder.record(about(1, "other"), "Lost", "gone")
    assert recorder.dropped == 12
    running = asyncio.ensure_future(recorder.run())
    assert await recorder.flush(10)
    running.cancel()
    namespaces = [each["metadata"]["namespace"] for each in written(store)]
    assert namespaces[:4].count("other") == 2, "the namespaces take turns"
    assert len(namespaces) == events.WAITING


@simulated
async def test_of_too_many_waiting_events_the_oldest_are_dropped() -> None:
    store = ObjectStore()
    recorder = EventRecorder(store, "x", "y")
    for n in range(events.WAITING + 10):
        recorder.record(about(n), "Lost", "gone")
    assert recorder.dropped == 10
    running = asyncio.ensure_future(recorder.run())
    assert await recorder.flush(10)
    running.cancel()
    names = {each["involvedObject"]["name"] for each in written(store)}
    assert "pod-9" not in names
    assert len(names) == events.WAITING


@simulated
async def test_the_memory_for_repetitions_is_bounded() -> None:
    store = ObjectStore()
    async with recording(store) as recorder:
        for n in range(events.REMEMBERED + 500):
            recorder.record(about(n), "Lost", "gone")
            if n % 500 == 0:
                await recorder.flush(10)
        await recorder.flush(10)
        assert len(recorder._series) == events.REMEMBERED
    assert recorder.dropped == 0


@simulated
async def test_texts_are_cut_to_the_servers_limits() -> None:
    store = ObjectStore()
    long = ObjectReference("v1", "Pod", "team", "x" * 253, "uid")
    async with recording(store) as recorder:
        recorder.record(long, "Lost", "y" * 5000)
        await recorder.flush(1)
    (found,) = written(store)
    assert len(found["message"]) == 1024
    assert len(found["metadata"]["name"]) <= 253


def test_a_reference_is_made_from_an_object() -> None:
    metadata = {"name": "job", "namespace": "team", "uid": "uid-1"}
    found = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "Supervision", "metadata": metadata}
    assert ObjectReference.of(found) == JOB
