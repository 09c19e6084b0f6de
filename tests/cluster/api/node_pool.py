"""Nodes without kubelets, agents that a test simulates, and supervisors that see no other nodes."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from holdfast.node_report import REPORT, REPORT_AT
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import NotFound
from supervisor.kubernetes.events import EVENTS, EventRecorder
from supervisor.kubernetes.lease import LeaseLock
from supervisor.kubernetes.watch import Mirror, ObjectName
from supervisor.nodes.controller import QuarantineController, QuarantinedJobs
from supervisor.nodes.names import CONFIG, RECORD, TAINT
from supervisor.nodes.node_mirror import NodeMirror
from tests.cluster.api.kinds import CONFIG_MAPS, NODES, config_map
from tests.unit.supervisor.nodes.test_controller import NoJobs

LIMIT_S = 30.0
QUICK = {
    "confirm": "200ms", "confirm-alone": "300ms", "storm-window": "500ms", "cooldown": "500ms",
    "clean": "2s", "max-clean": "60s", "alert": "10s", "repair": "1d", "stale": "60s", "dry-run": "false",
}  # fmt: skip
# What others have written on the node, and must find unchanged
FOREIGN_TAINTS = [
    {"key": "example.com/team", "value": "research", "effect": "NoSchedule"},
    {"key": "example.com/soon", "effect": "PreferNoSchedule"},
]
XID = {
    "check": "xid", "code": 79, "level": "unhealthy", "action": "reboot_node", "lasting": True,
    "sources": ["kmsg", "nvml-events"], "origins": ["driver log", "nvml"], "device": "GPU-1",
}  # fmt: skip
WORKS = "holdfast-nodeagent"  # the field manager of an agent


class PlayedNodes:
    """Nodes that exist only in the API and share a label that no other node has."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self._api, self.namespace = api, namespace
        self.label = f"holdfast.dev/test={uuid.uuid4().hex[:10]}"
        self.names: list[str] = []
        self._changed = asyncio.Event()
        self._mirror = Mirror(api, NODES, self._note, labels=self.label, prune=dict)

    def _note(self, *_: object) -> None:
        self._changed.set()

    async def add(self, count: int) -> list[str]:
        key, _, value = self.label.partition("=")
        for _ in range(count):
            name = f"played-{uuid.uuid4().hex[:8]}"
            metadata = {"name": name, "labels": {key: value}, "annotations": {"example.com/kept": "yes"}}
            body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
            await self._api.create(NODES, {**body, "spec": {"taints": FOREIGN_TAINTS}})
            self.names.append(name)
            status = {
                "conditions": [{"type": "Ready", "status": "True", "reason": "Played"}],
                "nodeInfo": {
                    **dict.fromkeys(_INFO, "x"), "bootID": "b1", "machineID": f"m-{name}",
                },
            }  # fmt: skip
            await self._api.patch(NODES, name, {"status": status}, subresource="status")
            await self.report(name)
        return self.names[-count:]

    async def remove(self) -> None:
        for name in self.names:
            try:
                await self._api.delete(NODES, name)
            except NotFound:
                continue

    async def report(self, name: str, *findings: dict[str, Any], held_s: float = 90.0, **given: Any) -> None:
        """Publish a report as the agent does. All reports differ, because each has a different time."""
        at_s = time.time()
        made = [{**each, "since_s": at_s - held_s, "last_s": at_s - held_s} for each in findings]
        raw = {
            "schema": 1, "node": name, "boot_id": "b1", "machine_id": f"m-{name}", "version": "0.1.0",
            "at_s": at_s, "booted_s": at_s - 9e4, "clean_s": 0.0 if findings else 9e4,
            "quiet_s": 0.0 if findings else 9e4, "calmed_s": None,
            "gpus": [{"entity": "gpu/0000:2b:00.0", "uuid": "GPU-1"}],
            "entities": [{"entity": "gpu/0000:2b:00.0", "findings": made}],
            "sensors": [{"name": "kmsg", "sees": True}], **given,
        }  # fmt: skip
        notes = {REPORT: json.dumps(raw), REPORT_AT: f"{at_s:.6f}"}
        await self._api.patch(NODES, name, {"metadata": {"annotations": notes}}, manager=WORKS)

    async def boot(self, name: str, boot_id: str) -> None:
        status = {"nodeInfo": {"bootID": boot_id}}
        await self._api.patch(NODES, name, {"status": status}, subresource="status")

    # -- what is on the nodes

    def node(self, name: str) -> dict[str, Any]:
        return dict(self._mirror.objects[ObjectName("", name)])

    def taints(self, name: str) -> list[dict[str, Any]]:
        """Return the taints, except the ones that Kubernetes adds because the node has no kubelet."""
        found = self.node(name)["spec"].get("taints") or []
        return [each for each in found if not each["key"].startswith("node.kubernetes.io/")]

    def is_tainted(self, name: str) -> bool:
        return any(each["key"] == TAINT for each in self.taints(name))

    def record(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.node(name)["metadata"]["annotations"].get(RECORD, "{}"))
        return found

    def condition(self, name: str) -> dict[str, Any]:
        conditions = {each["type"]: each for each in self.node(name)["status"]["conditions"]}
        found: dict[str, Any] = conditions.get("HoldfastQuarantined", {})
        return found

    def managers(self, name: str) -> set[str]:
        return {each["manager"] for each in self.node(name)["metadata"]["managedFields"]}

    async def until(self, condition: Callable[[], object]) -> float:
        """Wait until the condition is true, and return how many seconds that took."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()

        async def wait() -> None:
            await self._mirror.synced.wait()
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        try:
            await asyncio.wait_for(wait(), LIMIT_S)
        except asyncio.TimeoutError:
            shown = {name: (self.taints(name), self.record(name)) for name in self.names}
            raise AssertionError(f"not within {LIMIT_S:g} s: {shown}") from None
        return loop.time() - begun_s

    async def event(self, name: str, reason: str) -> str:
        """Wait for an Event about the node, and return its message."""
        fields = f"involvedObject.kind=Node,involvedObject.name={name},reason={reason}"
        since = (await self._api.list(EVENTS, "default", fields=fields)).version
        found = (await self._api.list(EVENTS, "default", fields=fields)).objects
        if found:
            return str(found[0]["message"])
        async with self._api.watch(EVENTS, since, "default", fields=fields, watch_s=int(LIMIT_S)) as events:
            async for event in events:
                if event.verb != "BOOKMARK":
                    return str(event.object["message"])
        raise AssertionError(f"no event {reason} about {name} within {LIMIT_S:g} s")

    # -- supervisors

    async def configure(self, **changed: str) -> None:
        data = {**QUICK, **{key.replace("_", "-"): value for key, value in changed.items()}}
        body = config_map(self.namespace, CONFIG, **data)
        await self._api.apply(CONFIG_MAPS, body, "test", force=True)

    @asynccontextmanager
    async def supervised(
        self, jobs: QuarantinedJobs | None = None, leads: Callable[[], float] = lambda: 60.0
    ) -> AsyncIterator[QuarantineController]:
        """Run the quarantine of one leader. At the end, it is killed at whatever point it has reached."""
        events = EventRecorder(self._api, "holdfast-supervisor", "test")
        nodes = NodeMirror(self._api, labels=self.label)
        made = QuarantineController(self._api, events, self.namespace, jobs or NoJobs(), leads, nodes)
        parts = (nodes.run(), made.run(), events.run(), self._mirror.run())
        running = [asyncio.ensure_future(each) for each in parts]
        await asyncio.wait_for(asyncio.gather(made.synced.wait(), self._mirror.synced.wait()), LIMIT_S)
        try:
            yield made
        finally:
            await events.flush(5.0)
            for each in running:
                each.cancel()
            await asyncio.wait(running)

    async def install(self) -> None:
        """Create the Lease, whose age is the age of the installation."""
        await LeaseLock(self._api, self.namespace, "holdfast-supervisor", "test").try_hold()


_INFO = (
    "architecture", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion",
    "operatingSystem", "osImage", "systemUUID",
)  # fmt: skip
