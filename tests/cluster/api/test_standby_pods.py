"""A real API server accepts standby pods at their model's priority, and shows which pods have no node."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from holdfast.process import event_loop
from supervisor.admission import pod_layout
from supervisor.cluster.standbys import pod_copy, waiting_pods
from supervisor.cluster.standbys.pod_copy import NoCopy
from supervisor.cluster.standbys.waiting_pods import WaitingPod
from supervisor.kubernetes.client import NODES, PODS, ApiServer, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, Forbidden, NotFound
from supervisor.kubernetes.watch import Mirror

pytestmark = pytest.mark.cluster
LIMIT_S = 30.0
PRIORITY_CLASSES = ResourceKind("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)
ACCOUNTS = ResourceKind("", "v1", "serviceaccounts")
LIMIT_RANGES = ResourceKind("", "v1", "limitranges")
QUOTAS = ResourceKind("", "v1", "resourcequotas")
CLAIMS = ResourceKind("resource.k8s.io", "v1", "resourceclaims")
CLAIM_TEMPLATES = ResourceKind("resource.k8s.io", "v1", "resourceclaimtemplates")
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


async def test_the_reason_of_a_quota_is_told(api: ApiServer, namespace: str) -> None:
    model = await created(api, namespace)
    await api.create(QUOTAS, {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "1"}}}, namespace)
    await _until_read(api, namespace)
    with pytest.raises(Forbidden, match="exceeded quota: full"):
        await api.create(PODS, standby(model, "n1"), namespace)


async def _until_read(api: ApiServer, namespace: str) -> None:
    """Return once the quota counts the pods that exist."""

    async def wait() -> None:
        while True:
            found = await api.get(QUOTAS, "full", namespace)
            if found.get("status", {}).get("used"):
                return
            await asyncio.sleep(0.1)

    await asyncio.wait_for(wait(), LIMIT_S)


async def test_a_standby_has_the_defaults_that_a_limit_range_gave_its_model(
    api: ApiServer, namespace: str
) -> None:
    limit = {"type": "Container", "default": {"cpu": "300m"}, "defaultRequest": {"cpu": "150m"}}
    await api.create(LIMIT_RANGES, {"metadata": {"name": "usual"}, "spec": {"limits": [limit]}}, namespace)
    model = await created(api, namespace, containers=[{"name": "c", "image": "none"}])
    found = await api.create(PODS, standby(model, "n1"), namespace)
    (container,) = found["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": "300m"}, "requests": {"cpu": "150m"}}


async def test_a_standby_gets_devices_of_its_own_by_a_claim_template(api: ApiServer, namespace: str) -> None:
    """Without such devices on any node, the scheduler says that it cannot allocate the claim."""
    try:
        await api.list(CLAIM_TEMPLATES, namespace)
    except NotFound:
        pytest.skip("this cluster has no resource.k8s.io/v1: it is older than Kubernetes 1.34")
    request = {"name": "gpu", "exactly": {"deviceClassName": "none.example"}}
    spec = {"spec": {"devices": {"requests": [request]}}}
    await api.create(CLAIM_TEMPLATES, {"metadata": {"name": "gpu"}, "spec": spec}, namespace)
    claims = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
    resources = {"requests": {"cpu": "10m"}, "claims": [{"name": "gpu"}]}
    container = {"name": "c", "image": "none", "resources": resources}
    model = await created(api, namespace, resourceClaims=claims, containers=[container])
    body = standby(model, "n1")
    del body["metadata"]["ownerReferences"]  # the garbage collector deletes a pod without its Supervision
    made = await api.create(PODS, body, namespace)
    assert made["spec"]["resourceClaims"] == claims

    async def claimed() -> str:
        while True:
            found = await api.get(PODS, made["metadata"]["name"], namespace)
            for each in found["status"].get("resourceClaimStatuses") or ():
                return str(each["resourceClaimName"])
            await asyncio.sleep(0.1)

    name = await asyncio.wait_for(claimed(), LIMIT_S)
    claim = await api.get(CLAIMS, name, namespace)
    assert claim["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"], "it shares no claim"


async def test_a_pod_that_uses_a_claim_by_name_is_not_copied(api: ApiServer, namespace: str) -> None:
    claims = [{"name": "gpu", "resourceClaimName": "mine"}]
    model = await created(api, namespace, resourceClaims=claims)
    found = pod_copy.standby_pod(model, "gpt", str(uuid.uuid4()), 1)
    assert isinstance(found, NoCopy)
    assert "ResourceClaim mine" in found.why


async def test_a_standby_of_a_gang_waits_for_no_gang_but_keeps_its_scheduler_and_queue(
    api: ApiServer, namespace: str
) -> None:
    """The scheduling gate of its model is gone, too: a model has ranks, so its gate was removed long ago."""
    labels = {"scheduling.x-k8s.io/pod-group": "gpt", "volcano.sh/job-name": "gpt", "app": "gpt"}
    annotations = {"scheduling.k8s.io/group-name": "gpt", "scheduling.volcano.sh/queue-name": "q"}
    model = await created(api, namespace, schedulingGates=[{"name": "example.com/gang"}])
    model = {**model, "metadata": {**model["metadata"], "labels": labels, "annotations": annotations}}
    made = await api.create(PODS, standby(model, "n1"), namespace)
    assert made["spec"]["schedulerName"] == "nobody"
    assert "schedulingGates" not in made["spec"]
    assert made["metadata"]["labels"].keys() == {"app", pod_layout.STANDBY_OF}
    assert made["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "q"}


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
