"""Make nodes and pods as the API server returns them, and a `ClusterRoom` that knows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from holdfast.process import event_loop
from supervisor.cluster.standbys import waiting_pods
from supervisor.cluster.standbys.cluster_room import ClusterRoom
from supervisor.kubernetes.client import PODS
from supervisor.kubernetes.watch import Mirror
from tests.unit.supervisor.cluster.api_server import LIMIT_S, ServedObjects

Json = dict[str, Any]


def node(name: str, cpu: str = "4", **spec: Any) -> Json:
    allocatable = {"cpu": cpu, "memory": "8Gi", "pods": "10"}
    labels = {"kubernetes.io/hostname": name, "zone": "a", "size": "4"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": dict(spec),
        "status": {"allocatable": allocatable},
    }


def pod(
    name: str,
    cpu: str = "1",
    on: str = "",
    *,
    labels: Mapping[str, str] | None = None,
    message: str = "",
    status: Json | None = None,
    **spec: Any,
) -> Json:
    """Return a pod. `message` is why the scheduler has not found a node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    container = {"name": "c", "resources": {"requests": {"cpu": cpu}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "team", "name": name, "uid": f"uid-{name}", "labels": dict(labels or {})},
        "spec": {"containers": [container], **({"nodeName": on} if on else {}), **spec},
        "status": {
            "phase": "Running" if on else "Pending",
            **({"conditions": [condition]} if message else {}),
            **(status or {}),
        },
    }


class WatchedRoom:
    """A room whose mirror of the pods that wait can be waited for."""

    def __init__(self, served: ServedObjects, room: ClusterRoom) -> None:
        self.room, self._served, self._changed = room, served, asyncio.Event()
        self.mirror = room._mirror = Mirror(
            room.server,
            PODS,
            lambda *_: self._changed.set(),
            fields=waiting_pods.SELECTOR,
            prune=waiting_pods.kept,
        )

    async def known(self) -> None:
        """Return once the mirror has all pods that wait, as they are now."""
        waiting = {
            name: each["metadata"]["resourceVersion"]
            for (kind, _, name), each in self._served.objects.items()
            if kind == "pods" and not each["spec"].get("nodeName")
        }
        there = self.mirror.objects

        async def wait() -> None:
            while {at.name: each["metadata"]["resourceVersion"] for at, each in there.items()} != waiting:
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), LIMIT_S)


@asynccontextmanager
async def watched_room(*nodes: Json) -> AsyncIterator[tuple[ServedObjects, WatchedRoom]]:
    """Serve these nodes, or else three of four cores, and yield what is served and its room."""
    served = ServedObjects()
    for each in nodes or (node("n1"), node("n2"), node("n3")):
        served.put("nodes", each)
    async with served.serving() as server:
        found = WatchedRoom(served, ClusterRoom(server))
        mirror = asyncio.create_task(found.mirror.run())
        await found.mirror.synced.wait()
        try:
            yield served, found
        finally:
            await event_loop.end([mirror])
