"""A real API server lets a node agent change its own conditions and annotations of its own Node only.

The tests create Node objects without a machine, and the shipped role and policy under other names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.node_report import REPORT, REPORT_AT
from nodeagent.publishing.conditions import GPU, TRAINING, NodeCondition, starting
from nodeagent.publishing.node_object import NodeObject, NotWritten
from nodeagent.publishing.node_patch import Transitions, node_patch
from supervisor.kubernetes import access
from supervisor.kubernetes.client import ApiServer, PatchType, ResourceKind
from supervisor.kubernetes.errors import ApiError, Forbidden
from tests.cluster.api.kinds import CONFIG_MAPS, NODES, PODS, SERVICE_ACCOUNTS, pod
from tests.cluster.api.test_identity import account_of

pytestmark = pytest.mark.cluster

BASE = Path(__file__).parents[3] / "manifests" / "base"
ACCOUNT = "holdfast-nodeagent"
LIMIT_S = 15.0
_ADMISSION, _RBAC = "admissionregistration.k8s.io", "rbac.authorization.k8s.io"
KINDS = {
    "ValidatingAdmissionPolicy": ResourceKind(_ADMISSION, "v1", "validatingadmissionpolicies", False),
    "ValidatingAdmissionPolicyBinding": ResourceKind(
        _ADMISSION, "v1", "validatingadmissionpolicybindings", False
    ),
    "ClusterRole": ResourceKind(_RBAC, "v1", "clusterroles", False),
    "ClusterRoleBinding": ResourceKind(_RBAC, "v1", "clusterrolebindings", False),
}
HEALTHY = tuple(NodeCondition(each, "True", "Healthy", "Well.") for each in (GPU, TRAINING))


@dataclass(frozen=True)
class Agent:
    """The account of an agent, with the files that its pod would have."""

    folder: Path
    own: str  # the name of its node
    other: str
    host: str
    port: int
    client: ApiServer  # with the agent's token

    def patch_status(self, patch: dict[str, Any], node: str = "") -> NotWritten | None:
        return NodeObject(self.host, self.port, node or self.own, self.folder).patch_status(patch)


def shipped(namespace: str) -> list[dict[str, Any]]:
    """Return the agent's objects for the whole cluster, for an agent in `namespace` and with its name."""
    text = (BASE / "access.yaml").read_text() + "\n---\n" + (BASE / "nodeagent-admission.yaml").read_text()
    found = []
    for each in yaml.safe_load_all(text.replace("holdfast-nodes", namespace)):
        if each is not None and each["metadata"]["name"] == ACCOUNT and each["kind"] in KINDS:
            each["metadata"]["name"] = namespace
            for reference in (each.get("roleRef"),):
                if reference is not None:
                    reference["name"] = namespace
            if "policyName" in each.get("spec", {}):
                each["spec"]["policyName"] = namespace
            found.append(each)
    assert {each["kind"] for each in found} == set(KINDS)
    return found


@pytest.fixture
async def agent(
    api: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agent]:
    objects, own, other = shipped(namespace), f"{namespace}-1", f"{namespace}-2"
    try:
        for name in (own, other):
            await api.create(NODES, node(name))
        for each in objects:
            await api.create(KINDS[each["kind"]], each)
        await account_of(api, namespace)
        await api.create(SERVICE_ACCOUNTS, account(), namespace)
        placed = pod(namespace, "agent", own)
        placed["spec"]["serviceAccountName"] = ACCOUNT
        made = dict(await api.create(PODS, placed, namespace))
        (tmp_path / "token").write_text(await agents_token(api, namespace, made))
        authority = await api.get(CONFIG_MAPS, "kube-root-ca.crt", "kube-system")
        (tmp_path / "ca.crt").write_text(authority["data"]["ca.crt"])
        (tmp_path / "namespace").write_text(namespace)
        host, _, port = api._access.url.rpartition("/")[2].rpartition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        async with ApiServer(await access._from_pod(tmp_path)) as client:
            found = Agent(tmp_path, own, other, host, int(port), client)
            await in_force(found)
            yield found
    finally:
        for each in objects:
            await gone(api, KINDS[each["kind"]], each["metadata"]["name"])
        for name in (own, other):
            await gone(api, NODES, name)


async def agents_token(api: ApiServer, namespace: str, made: dict[str, Any] | None = None) -> str:
    """Return a token as the kubelet requests it for the pod `made`; without `made`, it belongs to no pod."""
    spec: dict[str, Any] = {"expirationSeconds": 600}
    if made is not None:
        metadata = made["metadata"]
        reference = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec["boundObjectRef"] = reference
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = await api.create_subresource(SERVICE_ACCOUNTS, ACCOUNT, "token", body, namespace)
    token: str = answer["status"]["token"]
    return token


def account() -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}


def node(name: str) -> dict[str, Any]:
    """Return a node that gets no pods. Other agents have added a condition and an annotation to it."""
    metadata = {"name": name, "labels": {"of": "others"}, "annotations": {"of": "others"}}
    condition = {"type": "OfOthers", "status": "True", "reason": "Theirs", "message": "theirs"}
    status = {"conditions": [condition], "capacity": {"cpu": "4"}}
    spec = {"unschedulable": True}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": status}


async def gone(api: ApiServer, kind: ResourceKind, name: str) -> None:
    try:
        await api.delete(kind, name)
    except ApiError:
        pass  # an interrupted set-up has not created it


async def in_force(agent: Agent) -> None:
    """Return once the API server has seen the new role and the new policy."""
    own = node_patch(starting(), Transitions().after(starting(), 0.0), 0.0, None)
    end_s = asyncio.get_running_loop().time() + LIMIT_S
    refused = written = False
    while asyncio.get_running_loop().time() < end_s:
        written = written or agent.patch_status(own) is None
        refused = "may not change another node" in why(agent.patch_status(own, agent.other))
        if refused and written:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"written {written}, refused {refused}: {agent.patch_status(own)}")


def why(refused: NotWritten | None) -> str:
    return "" if refused is None else f"{refused.kind}: {refused.why}"


async def test_an_agent_writes_its_conditions_and_annotations_in_one_patch(
    api: ApiServer, agent: Agent
) -> None:
    before = await api.get(NODES, agent.own)
    transitions = Transitions().after(HEALTHY, 1795270041.0)
    assert agent.patch_status(node_patch(HEALTHY, transitions, 1795270041.25, '{"schema":1}')) is None
    after = await api.get(NODES, agent.own)
    notes = after["metadata"]["annotations"]
    assert (notes[REPORT], notes[REPORT_AT]) == ('{"schema":1}', "2026-11-21T14:07:21.250000Z")
    found = {each["type"]: each for each in after["status"]["conditions"]}
    assert [found[each]["status"] for each in (GPU, TRAINING)] == ["True", "True"]
    assert "OfOthers" in found, "conditions of others stay"
    assert (notes["of"], after["metadata"]["labels"]) == ("others", before["metadata"]["labels"])
    managers = {
        each["manager"]
        for each in after["metadata"]["managedFields"]
        if "status" in each.get("subresource", "")
    }
    assert "holdfast-nodeagent" in managers
    # A foreign value is overwritten.
    foreign = {
        "status": {"conditions": [{"type": GPU, "status": "False", "reason": "Foreign", "message": "x"}]}
    }
    await api.patch(NODES, agent.own, foreign, how=PatchType.STRATEGIC, subresource="status")
    assert agent.patch_status(node_patch(HEALTHY, transitions, 1795270042.0, '{"schema":1}')) is None
    after = await api.get(NODES, agent.own)
    assert {each["type"]: each["reason"] for each in after["status"]["conditions"]}[GPU] == "Healthy"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a label": ({"metadata": {"labels": {"a": "b"}}}, "labels"),
    "another's label removed": ({"metadata": {"labels": {"of": None}}}, "labels"),
    "an annotation": ({"metadata": {"annotations": {"a": "b"}}}, "its own annotations"),
    "another's annotation": ({"metadata": {"annotations": {"of": "me"}}}, "its own annotations"),
    "another's annotation removed": ({"metadata": {"annotations": {"of": None}}}, "its own annotations"),
    "a quarantine": ({"metadata": {"annotations": {"holdfast.dev/quarantine": "{}"}}}, "its own annotations"),
    "a finalizer": ({"metadata": {"finalizers": ["holdfast.dev/never"]}}, "finalizers"),
    "another's condition": (
        {"status": {"conditions": [{"type": "OfOthers", "status": "False"}]}}, "its own conditions",
    ),
    "a condition": ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, "its own conditions"),
    "another's condition removed": (
        {"status": {"conditions": [{"type": "OfOthers", "$patch": "delete"}]}}, "its own conditions",
    ),
    "a capacity": ({"status": {"capacity": {"nvidia.com/gpu": "8"}}}, "only change conditions"),
    "an address": (
        {"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}, "only change conditions",
    ),
}  # fmt: skip


async def test_an_agent_can_write_nothing_else(api: ApiServer, agent: Agent) -> None:
    before = await api.get(NODES, agent.own)
    for what, (patch, said) in REFUSED.items():
        told = why(agent.patch_status(patch))
        assert said in told, (what, told)
        assert "holdfast" in told or "ValidatingAdmissionPolicy" in told, told
    taint = {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}
    assert agent.patch_status(taint) is None, "the status subresource ignores a spec"
    after = await api.get(NODES, agent.own)
    # During the test, the controllers of the cluster taint the node, because it has no machine.
    assert "a" not in {each["key"] for each in after["spec"].get("taints", [])}
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    for attempt in (
        agent.client.patch(NODES, agent.own, taint),
        agent.client.patch(NODES, agent.own, {"metadata": {"labels": {"a": "b"}}}),
        agent.client.get(NODES, agent.own),
        agent.client.list(NODES),
        agent.client.list(PODS),
        agent.client.delete(NODES, agent.own),
        agent.client.create(NODES, node("another")),
    ):
        with pytest.raises(Forbidden, match="system:serviceaccount"):
            await attempt


async def test_an_agent_cannot_touch_another_node(api: ApiServer, agent: Agent) -> None:
    patch = node_patch(HEALTHY, Transitions().after(HEALTHY, 0.0), 0.0, "{}")
    told = why(agent.patch_status(patch, agent.other))
    assert f"the node agent of {agent.own} may not change another node" in told
    there = await api.get(NODES, agent.other)
    # Before the policy was in force, `in_force` may have written Unknown.
    assert (GPU, "True") not in {(each["type"], each["status"]) for each in there["status"]["conditions"]}
    assert REPORT not in there["metadata"]["annotations"]


async def test_a_token_that_belongs_to_no_pod_can_write_no_node(
    api: ApiServer, namespace: str, agent: Agent
) -> None:
    (agent.folder / "token").write_text(await agents_token(api, namespace))
    patch = node_patch(HEALTHY, Transitions().after(HEALTHY, 0.0), 0.0, "{}")
    assert "may not change another node" in why(agent.patch_status(patch))


async def test_the_policy_holds_even_if_somebody_grants_the_account_all_rights_on_nodes(
    api: ApiServer, namespace: str, agent: Agent
) -> None:
    everything = ["create", "get", "patch", "update", "delete"]
    rule = {"apiGroups": [""], "resources": ["nodes", "nodes/status"], "verbs": everything}
    name = f"{namespace}-all"
    reference = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    common = {"apiVersion": f"{_RBAC}/v1", "metadata": {"name": name}}
    await api.create(KINDS["ClusterRole"], {**common, "kind": "ClusterRole", "rules": [rule]})
    try:
        binding = {**common, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]}
        await api.create(KINDS["ClusterRoleBinding"], binding)
        await _granted(agent)
        refused: list[str] = []
        for attempt in (
            agent.client.patch(
                NODES, agent.own, {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}
            ),
            agent.client.patch(NODES, agent.own, {"spec": {"unschedulable": False}}),
            agent.client.patch(NODES, agent.own, {"metadata": {"labels": {"a": "b"}}}),
            agent.client.patch(NODES, agent.other, {"metadata": {"annotations": {REPORT: "{}"}}}),
            agent.client.delete(NODES, agent.other),
            agent.client.delete(NODES, agent.own),
            agent.client.create(NODES, node(f"{namespace}-3")),
        ):
            try:
                await attempt
            except ApiError as error:
                refused.append(str(error))
        assert len(refused) == 7
        assert all("ValidatingAdmissionPolicy" in each for each in refused), refused
    finally:
        await gone(api, KINDS["ClusterRoleBinding"], name)
        await gone(api, KINDS["ClusterRole"], name)


async def _granted(agent: Agent) -> None:
    end_s = asyncio.get_running_loop().time() + LIMIT_S
    while asyncio.get_running_loop().time() < end_s:
        try:
            await agent.client.get(NODES, agent.own)
            return
        except Forbidden:
            await asyncio.sleep(0.1)
    raise AssertionError("the granted rights are not in force")
