"""A real API server accepts standby pods at their model's priority, and shows which pods have no node."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from holdfast.process import event_loop
from supervisor.cluster.standbys import pod_copy, waiting_pods
from supervisor.cluster.standbys.waiting_pods import WaitingPod
from supervisor.kubernetes.client import NODES, PODS, ApiServer, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, Forbidden
from supervisor.kubernetes.watch import Mirror

pytestmark = pytest.mark.cluster
LIMIT_S = 30.0
PRIORITY_CLASSES = ResourceKind("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)
ACCOUNTS = ResourceKind("", "v1", "serviceaccounts")
LIMIT_RANGES = ResourceKind("", "v1", "limitranges")
LACKS = "0/3 nodes are available: 3 Insufficient cpu."


@pytest.fixture
async def priority_class(api: ApiServer) -> AsyncIterator[str]:
    name = f"api-test-{uuid.uuid4().hex[:8]}"
    found = {"metadata": {"name": name}, "value": 1234, "preemptionPolicy": "Never"}
    await api.create(PRIORITY_CLASSES, found)
    try:
        yield name
    finally:
        await api.delete(PRIORITY_CLASSES, name)


async def created(api: ApiServer, namespace: str, **spec: Any) -> KubernetesObject:
    """Create a pod that no scheduler handles."""
    with suppress(AlreadyThere):  # the controller creates it soon after the namespace
        await api.create(ACCOUNTS, {"metadata": {"name": "default"}}, namespace)
    resources = {"requests": {"cpu": "200m"}, "limits": {"cpu": "200m"}}
    container = {"name": "c", "image": "none", "resources": resources}
    body = {
        "metadata": {"name": "gpt-0", "labels": {"app": "gpt"}},
        "spec": {"schedulerName": "nobody", "containers": [container], **spec},
    }
    return await api.create(PODS, body, namespace)


def standby(model: KubernetesObject, *nodes: str) -> dict[str, Any]:
    found = pod_copy.standby_pod(model, "gpt", str(uuid.uuid4()), 1)
    assert isinstance(found, dict)
    return pod_copy.on_nodes(found, nodes)


async def test_a_standby_is_accepted_with_its_models_priority(
    api: ApiServer, namespace: str, priority_class: str
) -> None:
    model = await created(api, namespace, priorityClassName=priority_class)
    nodes = [each["metadata"]["name"] for each in (await api.list(NODES)).objects] or ["n1"]
    found = await api.create(PODS, standby(model, *nodes), namespace)
    for name in ("priority", "preemptionPolicy", "priorityClassName"):
        assert found["spec"][name] == model["spec"][name]
    assert found["spec"]["priority"] == 1234


async def test_the_reason_of_a_limit_range_is_told(api: ApiServer, namespace: str) -> None:
    model = await created(api, namespace)
    limit = {"type": "Container", "max": {"cpu": "100m"}}
    await api.create(LIMIT_RANGES, {"metadata": {"name": "small"}, "spec": {"limits": [limit]}}, namespace)
    with pytest.raises(Forbidden, match="maximum cpu usage"):
        await api.create(PODS, standby(model, "n1"), namespace)


async def test_the_mirror_has_a_pod_exactly_while_it_has_no_node(api: ApiServer, namespace: str) -> None:
    changed = asyncio.Event()
    mirror = Mirror(
        api,
        PODS,
        lambda *_: changed.set(),
        namespace=namespace,
        fields=waiting_pods.SELECTOR,
        prune=waiting_pods.kept,
    )
    running = asyncio.ensure_future(mirror.run())

    def waiting() -> list[WaitingPod]:
        return waiting_pods.found_in(mirror.objects.values())

    async def until(lacks_room: list[bool]) -> None:
        async def wait() -> None:
            while [each.lacks_room for each in waiting()] != lacks_room:
                changed.clear()
                await changed.wait()

        await asyncio.wait_for(wait(), LIMIT_S)

    await created(api, namespace)
    await until([False])
    assert waiting()[0].needs.requests == {"cpu": 200, "pods": 1}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": LACKS}
    await api.patch(PODS, "gpt-0", {"status": {"conditions": [condition]}}, namespace, subresource="status")
    await until([True])
    target = {"apiVersion": "v1", "kind": "Node", "name": "none"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "gpt-0"}, "target": target}
    await api.create_subresource(PODS, "gpt-0", "binding", binding, namespace)
    await until([])
    await event_loop.end({running})
