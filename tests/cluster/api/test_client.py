"""The client sends each kind of request to a real API server, and understands its answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from supervisor.kubernetes import access, client
from supervisor.kubernetes.client import ApiServer, PatchType
from supervisor.kubernetes.errors import (
    AlreadyThere,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    InvalidObject,
    NotFound,
    ServerUnreachable,
    Unauthenticated,
)
from supervisor.kubernetes.events import EVENTS
from supervisor.kubernetes.lease import LEASES
from tests.cluster.api.kinds import CONFIG_MAPS, NAMESPACES, NODES, PODS, SERVICE_ACCOUNTS, config_map, pod

pytestmark = pytest.mark.cluster
LIMIT_S = 30.0


async def test_an_object_is_created_read_changed_and_deleted(api: ApiServer, namespace: str) -> None:
    made = await api.create(CONFIG_MAPS, config_map(namespace, "a", x="1"), namespace)
    assert made["metadata"]["uid"]
    with pytest.raises(AlreadyThere):
        await api.create(CONFIG_MAPS, config_map(namespace, "a"), namespace)
    changed = await api.patch(CONFIG_MAPS, "a", {"data": {"y": "2"}}, namespace)
    assert changed["data"] == {"x": "1", "y": "2"}
    replaced = await api.replace(CONFIG_MAPS, {**changed, "data": {"z": "3"}})
    assert (await api.get(CONFIG_MAPS, "a", namespace))["data"] == replaced["data"] == {"z": "3"}
    await api.delete(CONFIG_MAPS, "a", namespace)
    for request in (api.get(CONFIG_MAPS, "a", namespace), api.delete(CONFIG_MAPS, "a", namespace)):
        with pytest.raises(NotFound, match='configmaps "a" not found'):
            await request


async def test_each_write_can_be_conditional(api: ApiServer, namespace: str) -> None:
    old = await api.create(CONFIG_MAPS, config_map(namespace, "a", x="1"), namespace)
    new = await api.patch(CONFIG_MAPS, "a", {"data": {"x": "2"}}, namespace)
    version = old["metadata"]["resourceVersion"]
    attempts = [
        api.replace(CONFIG_MAPS, {**old, "data": {}}),
        api.patch(CONFIG_MAPS, "a", {"metadata": {"resourceVersion": version}, "data": {}}, namespace),
        api.patch(CONFIG_MAPS, "a", {"metadata": {"uid": "other"}, "data": {"x": "3"}}, namespace),
        api.delete(CONFIG_MAPS, "a", namespace, version=version),
        api.delete(CONFIG_MAPS, "a", namespace, uid="other"),
    ]
    for attempt in attempts:
        with pytest.raises(Conflict):
            await attempt
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    change = {"op": "replace", "path": "/data/x", "value": "3"}
    with pytest.raises(InvalidObject):
        await api.patch(CONFIG_MAPS, "a", [test, change], namespace, how=PatchType.JSON)
    assert await api.get(CONFIG_MAPS, "a", namespace) == new
    await api.delete(CONFIG_MAPS, "a", namespace, uid=new["metadata"]["uid"])


async def test_each_field_is_owned_by_the_client_that_applied_it(api: ApiServer, namespace: str) -> None:
    await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="ours", y="ours"), "holdfast")
    with pytest.raises(Conflict, match="conflict"):
        await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="theirs"), "other")
    taken = await api.apply(CONFIG_MAPS, config_map(namespace, "a", x="theirs"), "other", force=True)
    assert taken["data"] == {"x": "theirs", "y": "ours"}
    left = await api.apply(CONFIG_MAPS, config_map(namespace, "a"), "holdfast")
    assert left["data"] == {"x": "theirs"}


async def test_a_status_patch_leaves_the_rest_of_the_object_unchanged(api: ApiServer, namespace: str) -> None:
    await api.create(PODS, pod(namespace, "p"), namespace)
    condition = {"type": "holdfast.dev/Test", "status": "True"}
    body = {"spec": {"schedulingGates": []}, "status": {"conditions": [condition]}}
    found = await api.patch(PODS, "p", body, namespace, subresource="status", how=PatchType.STRATEGIC)
    assert any(each["type"] == condition["type"] for each in found["status"]["conditions"])
    assert found["spec"]["schedulingGates"]


async def test_a_pod_is_evicted(api: ApiServer, namespace: str) -> None:
    made = await api.create(PODS, pod(namespace, "p"), namespace)
    metadata = {"name": "p", "namespace": namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    condition = {"preconditions": {"uid": made["metadata"]["uid"]}}  # with another, it tries for 10 s
    await api.create_subresource(PODS, "p", "eviction", {**body, "deleteOptions": condition}, namespace)
    with pytest.raises(NotFound):
        await api.get(PODS, "p", namespace)


async def test_an_invalid_object_is_refused_with_the_field_s_name(api: ApiServer, namespace: str) -> None:
    with pytest.raises(InvalidObject, match=r"spec\.containers: Required value"):
        await api.create(PODS, {**pod(namespace, "p"), "spec": {"containers": []}}, namespace)
    with pytest.raises(InvalidObject, match=r"metadata\.name"):
        await api.create(CONFIG_MAPS, config_map(namespace, "Not/A Name"), namespace)
    with pytest.raises(NotFound):  # a name with a slash is looked for as one name
        await api.get(CONFIG_MAPS, "a/b", namespace)


async def test_a_list_includes_all_pages_and_only_objects_that_match_its_selectors(
    api: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 10)
    names = [f"map-{n:02}" for n in range(35)]
    await asyncio.gather(*(api.create(CONFIG_MAPS, config_map(namespace, name), namespace) for name in names))
    found = await api.list(CONFIG_MAPS, namespace, labels="test=yes")
    assert [each["metadata"]["name"] for each in found.objects] == names
    assert {(each["kind"], each["apiVersion"]) for each in found.objects} == {("ConfigMap", "v1")}
    one = await api.list(CONFIG_MAPS, namespace, fields="metadata.name=map-07")
    assert [each["metadata"]["name"] for each in one.objects] == ["map-07"]
    assert (await api.list(CONFIG_MAPS, namespace, labels="test=no")).objects == ()
    everywhere = await api.list(CONFIG_MAPS, labels="test=yes")
    assert len(everywhere.objects) >= len(names)


async def test_a_watch_begins_after_its_version_and_ends_at_its_timeout(
    api: ApiServer, namespace: str
) -> None:
    await api.create(CONFIG_MAPS, config_map(namespace, "before"), namespace)
    since = (await api.list(CONFIG_MAPS, namespace)).version
    async with api.watch(CONFIG_MAPS, since, namespace, labels="test=yes", watch_s=2) as events:
        await api.create(CONFIG_MAPS, config_map(namespace, "a"), namespace)
        await api.patch(CONFIG_MAPS, "a", {"metadata": {"labels": {"test": "no"}}}, namespace)
        seen = [(event.verb, event.object["metadata"].get("name")) async for event in events]
    assert [each for each in seen if each[0] != "BOOKMARK"] == [("ADDED", "a"), ("DELETED", "a")]


async def test_a_version_that_the_server_has_forgotten_is_gone(api: ApiServer) -> None:
    """A newly installed server may still have the first version of some kinds, but not of all of them."""
    for kind in (NODES, CONFIG_MAPS, PODS, LEASES, EVENTS):
        try:
            async with api.watch(kind, "1", watch_s=1) as events:
                await anext(events, None)
        except Gone:
            return
    pytest.skip("this API server has not forgotten anything yet")


async def test_an_account_without_rights_and_one_that_was_deleted_are_refused(
    api: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test creates the service account files that a pod would have."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}}
    await api.create(SERVICE_ACCOUNTS, account, namespace)
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    made = await api.create_subresource(SERVICE_ACCOUNTS, "a", "token", body, namespace)
    (tmp_path / "token").write_text(made["status"]["token"])
    bundle = await api.get(CONFIG_MAPS, "kube-root-ca.crt", "kube-system")
    (tmp_path / "ca.crt").write_text(bundle["data"]["ca.crt"])
    (tmp_path / "namespace").write_text(namespace)
    _, _, address = api._access.url.rpartition("/")
    host, _, port = address.rpartition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    async with ApiServer(await access._from_pod(tmp_path)) as pod_api:
        assert pod_api.namespace == namespace
        with pytest.raises(Forbidden, match=f"system:serviceaccount:{namespace}:a"):
            await pod_api.list(PODS, namespace)
        await api.delete(SERVICE_ACCOUNTS, "a", namespace)
        with pytest.raises(Unauthenticated):
            await _until_refused(pod_api, namespace)


async def _until_refused(api: ApiServer, namespace: str) -> None:
    """Repeat the request until it is refused, because the server caches a valid token for some seconds."""
    end = asyncio.get_running_loop().time() + LIMIT_S
    while asyncio.get_running_loop().time() < end:
        try:
            await api.get(PODS, "p", namespace)
        except Forbidden:
            continue


async def test_a_server_with_a_certificate_of_another_authority_is_refused(
    tmp_path: Path, api: ApiServer
) -> None:
    await api.get(NAMESPACES, "default")
    config = tmp_path / "config"
    config.write_text(
        f"clusters: [{{name: c, cluster: {{server: {api._access.url}}}}}]\n"
        "users: [{name: u, user: {token: x}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\n"
        "current-context: c\n"
    )
    async with await client.connect(config) as stranger:
        with pytest.raises(ServerUnreachable, match="certificate") as caught:
            await stranger.get(NAMESPACES, "default")
    assert not caught.value.sent


async def test_an_unknown_kind_is_not_found(api: ApiServer, namespace: str) -> None:
    nothing = client.ResourceKind("holdfast.invalid", "v1", "nothings")
    with pytest.raises(ApiError) as caught:
        await api.list(nothing, namespace)
    assert isinstance(caught.value, NotFound)
