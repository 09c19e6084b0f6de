"""Node agents with GPUs that a stand-in for NVML simulates, so that a test can break the GPUs.

A ConfigMap adds the library and its state to the pods, so the nodes need no preparation.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from holdfast.node_report import REPORT_AT
from nodeagent.publishing.conditions import GPU, TRAINING
from tests.cluster.apparatus.kubernetes_cluster import AGENT, NODES, READY_S, ClusterUnderTest, rolled_out
from tests.fakenvml import build, layout, state

FAKE = "fake-nvml"
STATE = "/fake/state/agent"  # the agent's state folder, on a volume of its pod
FIRST_GPU = "0000:1b:00.0"  # its bus address in the stand-in
CODE = {"layout.py": Path(layout.__file__), "state.py": Path(state.__file__)}
_FAKE = "from pathlib import Path; from tests.fakenvml.state import Fake; "
_CREATE = _FAKE + "Fake(Path('/fake/state/nvml'), 2).close()"
_XID = "import time; print(time.time()); " + _FAKE + "Fake.existing(Path('/fake/state/nvml')).xid(0, 79)"


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

    def xid_79(self, node: str) -> float:
        """Have a node's driver report that a GPU has fallen off the bus, and return when it did so."""
        name = self.pod(node)["metadata"]["name"]
        words = ("exec", "-n", NODES, name, "-c", "nodeagent", "--", "python", "-c", _XID)
        return float(self.cluster.kubectl(*words))

    def clear(self, node: str) -> None:
        """Tell a node's agent that its first GPU is repaired, as an operator does after a diagnosis."""
        name = self.pod(node)["metadata"]["name"]
        words = (
            "holdfast",
            "node",
            "clear",
            f"gpu/{FIRST_GPU}",
            f"--state-dir={STATE}",
            "--why",
            "it passed",
        )
        self.cluster.kubectl("exec", "-n", NODES, name, "-c", "nodeagent", "--", *words)

    def until(self, node: str, words: str, limit_s: float = READY_S) -> None:
        """Wait until the condition `GpuHealthy` of a node is `words`, and both conditions have that status.

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
        """Return the different words of `GpuHealthy` that are seen until it is `until`."""
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


def break_in(cluster: ClusterUnderTest) -> Agents:
    """Restart the agents with two healthy GPUs each and without a kernel log, and return them.

    Raises `build.NoCompiler`.
    """
    library = build.build().read_bytes()
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": FAKE, "namespace": NODES},
        "binaryData": {build.SONAME: base64.b64encode(library).decode()},
        "data": {name: path.read_text() for name, path in CODE.items()},
    }
    cluster.kubectl("apply", "--server-side", "-f", "-", text=json.dumps(config))
    patch = json.dumps(with_fake_gpus())
    cluster.kubectl("patch", "daemonset", AGENT, "-n", NODES, "--type=strategic", "-p", patch)
    rolled_out(cluster)
    found = Agents(cluster)
    for node in found.nodes:
        found.until(node, "True Healthy")
    return found


def restore(cluster: ClusterUnderTest) -> None:
    """Restart the agents as they were before."""
    cluster.kubectl("rollout", "undo", f"daemonset/{AGENT}", "-n", NODES)
    rolled_out(cluster)
    cluster.kubectl("delete", "configmap", FAKE, "-n", NODES)


def with_fake_gpus() -> dict[str, Any]:
    """Return a patch of the DaemonSet that mounts the fake library, and its state on a volume of the pod."""
    code = [{"key": name, "path": f"tests/fakenvml/{name}"} for name in CODE]
    items = [{"key": build.SONAME, "path": build.SONAME}, *code]
    mounts = [{"name": FAKE, "mountPath": "/fake/code"}, {"name": "fake-state", "mountPath": "/fake/state"}]
    container = {
        "name": "nodeagent",
        "args": [
            "holdfast", "node", "serve", "--publish", "--listen=$(POD_IP):9465",
            "--probe-listen=$(POD_IP):9466", "--kernel-log=none", f"--state-dir={STATE}",
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
