"""Node agents publish on the Nodes of a real cluster. Their GPUs are those of a stand-in for NVML.

The library and its state are brought into the pods by a ConfigMap, so the nodes need nothing.
"""

from __future__ import annotations

import base64
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.node_report import REPORT, REPORT_AT
from nodeagent.publishing.conditions import GPU, TRAINING
from nodeagent.publishing.schedule import HEARTBEAT_S
from supervisor.quarantine.reports import read_report
from tests.cluster.apparatus.kubernetes_cluster import (
    AGENT,
    NODES,
    READY_S,
    ClusterUnderTest,
    is_lent,
    rolled_out,
)
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.fakenvml import build, layout, state

FAKE = "fake-nvml"
SEEN_S = 15.0  # from a fault until the Node says so, on a busy machine; a second on one that is not
CODE = {"layout.py": Path(layout.__file__), "state.py": Path(state.__file__)}
_FAKE = "from pathlib import Path; from tests.fakenvml.state import Fake; "
_CREATE = _FAKE + "Fake(Path('/fake/state/nvml'), 2).close()"
_XID = _FAKE + "Fake.existing(Path('/fake/state/nvml')).xid(0, 79)"


class Agents:
    """The agents of the cluster, and what they have published."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self.cluster = cluster
        found = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
        self.nodes = [each["metadata"]["name"] for each in found if _is_ready(each)]

    def pod(self, node: str) -> dict[str, Any]:
        """Return the newest pod of a node."""
        path = f"/api/v1/namespaces/{NODES}/pods?fieldSelector=spec.nodeName={node}"
        pods: list[dict[str, Any]] = self.cluster.read(path)["items"]
        return max(pods, key=lambda each: str(each["metadata"]["creationTimestamp"]))

    def published(self, node: str) -> tuple[dict[str, str], str]:
        """Return each condition as `status reason`, and the time of the report."""
        found = self.cluster.read(f"/api/v1/nodes/{node}")
        kept = {
            each["type"]: each for each in found["status"]["conditions"] if each["type"] in (GPU, TRAINING)
        }
        words = {type_: f"{each['status']} {each['reason']}" for type_, each in kept.items()}
        return words, found["metadata"].get("annotations", {}).get(REPORT_AT, "")

    def until(self, node: str, words: str, limit_s: float = READY_S) -> None:
        """Return once `GpuHealthy` of a node says `words`, and both conditions have that status.

        The machine below the node may have a degraded clock or disk, so the other reason may differ.
        """
        status = words.split()[0]

        def look() -> bool | None:
            found, _ = self.published(node)
            both = [each.split()[0] for each in found.values()]
            return True if found.get(GPU) == words and both == [status, status] else None

        what = f"{GPU} of {node} says {words}, and {TRAINING} {status}"
        self.cluster.until(look, what, NODES, limit_s)

    def watch(self, node: str, until: str, limit_s: float = READY_S) -> list[str]:
        """Return the different words of `GpuHealthy` that are seen until it says `until`."""
        seen: list[str] = []

        def look() -> bool | None:
            now = self.published(node)[0].get(GPU, "")
            if not seen or seen[-1] != now:
                seen.append(now)
            return True if now == until and len(seen) > 1 else None

        self.cluster.until(look, f"{GPU} of {node} says {until}; seen: {seen}", NODES, limit_s)
        return seen


def _is_ready(node: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])


@pytest.fixture(scope="module")
def agents(installed: ClusterUnderTest) -> Iterator[Agents]:
    """Yield the agents, restarted with two healthy GPUs each and without a kernel log."""
    if is_lent():
        pytest.skip("HOLDFAST_INSTALLED=1: others use what is installed")
    try:
        library = build.build().read_bytes()
    except build.NoCompiler as error:
        pytest.skip(str(error))
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": FAKE, "namespace": NODES},
        "binaryData": {build.SONAME: base64.b64encode(library).decode()},
        "data": {name: path.read_text() for name, path in CODE.items()},
    }
    installed.kubectl("apply", "--server-side", "-f", "-", text=json.dumps(config))
    patch = json.dumps(with_fake_gpus())
    installed.kubectl("patch", "daemonset", AGENT, "-n", NODES, "--type=strategic", "-p", patch)
    rolled_out(installed)
    found = Agents(installed)
    for node in found.nodes:
        found.until(node, "True Healthy")
    yield found
    installed.kubectl("rollout", "undo", f"daemonset/{AGENT}", "-n", NODES)
    rolled_out(installed)
    installed.kubectl("delete", "configmap", FAKE, "-n", NODES)


def with_fake_gpus() -> dict[str, Any]:
    """Return a patch of the DaemonSet that mounts the fake library, and its state on a volume of the pod."""
    code = [{"key": name, "path": f"tests/fakenvml/{name}"} for name in CODE]
    items = [{"key": build.SONAME, "path": build.SONAME}, *code]
    mounts = [{"name": FAKE, "mountPath": "/fake/code"}, {"name": "fake-state", "mountPath": "/fake/state"}]
    container = {
        "name": "nodeagent",
        "args": [
            "holdfast", "node", "serve", "--publish", "--listen=$(POD_IP):9465",
            "--probe-listen=$(POD_IP):9466", "--kernel-log=none", "--state-dir=/fake/state/agent",
        ],
        "env": [
            {"name": "LD_LIBRARY_PATH", "value": "/fake/code"},
            {"name": "PYTHONPATH", "value": "/fake/code"},
            {"name": state.VARIABLE, "value": "/fake/state/nvml"},
        ],
        "volumeMounts": mounts,
    }  # fmt: skip
    creates = {
        "name": "fake",
        "image": "holdfast:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", _CREATE],
        "env": [{"name": "PYTHONPATH", "value": "/fake/code"}],
        "volumeMounts": mounts,
    }
    volumes = [
        {"name": FAKE, "configMap": {"name": FAKE, "items": items}},
        {"name": "fake-state", "emptyDir": {}},
    ]
    spec = {"initContainers": [creates], "containers": [container], "volumes": volumes}
    return {"spec": {"template": {"spec": spec}}}  # `rollout undo` restores the template only


def test_every_node_has_both_conditions_and_a_report_of_its_own_machine(agents: Agents) -> None:
    assert agents.nodes
    for node in agents.nodes:
        agents.until(node, "True Healthy")
        found = agents.cluster.read(f"/api/v1/nodes/{node}")
        raw = json.loads(found["metadata"]["annotations"][REPORT])
        info = found["status"]["nodeInfo"]
        assert (raw["node"], raw["boot_id"]) == (node, info["bootID"])
        assert raw["machine_id"] == info["machineID"]
        report = read_report(raw)
        assert len(report.devices) == 2


def test_a_finding_changes_the_conditions_of_its_node_only(agents: Agents) -> None:
    node, *others = agents.nodes
    name = agents.pod(node)["metadata"]["name"]
    agents.cluster.kubectl("exec", "-n", NODES, name, "-c", "nodeagent", "--", "python", "-c", _XID)
    agents.until(node, "False Xid79", SEEN_S)
    found = agents.cluster.read(f"/api/v1/nodes/{node}")
    findings = read_report(json.loads(found["metadata"]["annotations"][REPORT])).findings
    (finding,) = (each for each in findings if each.device)
    assert (finding.level, finding.action) == ("unhealthy", "reboot_node")
    for other in others:
        assert agents.published(other)[0][GPU] == "True Healthy"


def test_a_deleted_agent_makes_its_node_unknown_until_the_next_one_has_looked(agents: Agents) -> None:
    """The next pod has other GPUs and another saved state, so the finding of the test before is gone."""
    node = agents.nodes[0]
    name = agents.pod(node)["metadata"]["name"]
    agents.cluster.kubectl("delete", "pod", name, "-n", NODES, "--wait=false")
    seen = agents.watch(node, "True Healthy")
    assert "Unknown AgentStopped" in seen or "Unknown AgentStarting" in seen, seen
    assert agents.pod(node)["metadata"]["name"] != name


def test_the_report_of_an_agent_that_is_frozen_or_killed_goes_stale(
    agents: Agents, node_processes: NodeProcesses
) -> None:
    node = agents.nodes[-1]
    pod = agents.pod(node)
    container = pod["status"]["containerStatuses"][0]
    node_processes.signal_first(node, container["containerID"], signal.SIGSTOP)
    stale = agents.published(node)[1]  # a write that was in flight has arrived
    end_s = time.monotonic() + HEARTBEAT_S + 5.0
    while time.monotonic() < end_s:  # nothing can announce that nothing happens
        words, at = agents.published(node)
        assert (words[GPU], at) == ("True Healthy", stale), "a frozen agent has written"
        time.sleep(1.0)
    node_processes.kill_first(node, container["containerID"])
    agents.cluster.until(
        lambda: True if agents.published(node)[1] > stale else None, "another report", NODES, READY_S
    )
    agents.until(node, "True Healthy")
    again = agents.pod(node)
    assert again["metadata"]["name"] == pod["metadata"]["name"]
    assert again["status"]["containerStatuses"][0]["restartCount"] == container["restartCount"] + 1


def test_the_api_server_has_no_doubt_about_the_policy(installed: ClusterUnderTest) -> None:
    """It checks the types of each expression, and lists what it cannot explain."""
    path = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{AGENT}"
    status = installed.until(
        lambda: installed.read(path).get("status") or None, "the policy has been checked", NODES, READY_S
    )
    assert status["typeChecking"] == {}
