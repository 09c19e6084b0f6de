"""A real API server stores the events that we record."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.events import EVENTS, EventRecorder, ObjectReference
from tests.cluster.api.kinds import CONFIG_MAPS, NODES, config_map

pytestmark = pytest.mark.cluster
LIMIT_S = 20.0


async def test_events_are_found_by_their_object_and_repetitions_increase_their_count(
    api: ApiServer, namespace: str
) -> None:
    job = ObjectReference.of(await api.create(CONFIG_MAPS, config_map(namespace, "job"), namespace))
    recorder = EventRecorder(api, "holdfast-supervisor", "pod-1")
    running = asyncio.ensure_future(recorder.run())
    for n in range(3):
        recorder.record(job, "Restarted", f"fault {n}", "Warning")
        assert await recorder.flush(LIMIT_S)
    recorder.record(job, "Finished", "done")
    assert await recorder.flush(LIMIT_S)
    running.cancel()
    await asyncio.wait({running})
    fields = f"involvedObject.name=job,involvedObject.uid={job.uid}"
    found = (await api.list(EVENTS, namespace, fields=fields)).objects
    assert {(each["reason"], each["count"], each["message"], each["type"]) for each in found} == {
        ("Restarted", 3, "fault 2", "Warning"),
        ("Finished", 1, "done", "Normal"),
    }
    assert recorder.dropped == 0


async def test_an_event_about_a_node_is_accepted(api: ApiServer) -> None:
    node = ObjectReference.of((await api.list(NODES)).objects[0])
    recorder = EventRecorder(api, "holdfast-test", "pod-1")
    running = asyncio.ensure_future(recorder.run())
    recorder.record(node, "Tested", "nothing happened")
    assert await recorder.flush(LIMIT_S)
    running.cancel()
    await asyncio.wait({running})
    fields = f"involvedObject.kind=Node,involvedObject.name={node.name},reason=Tested"
    found = (await api.list(EVENTS, "default", fields=fields)).objects
    for each in found:
        await api.delete(EVENTS, each["metadata"]["name"], "default")
    assert len(found) == 1
    assert recorder.dropped == 0
