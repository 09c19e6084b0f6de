"""Kill the first process of a container, which no process inside the container can do.

A privileged pod on the same node kills it, which works on any cluster. The pod shares the node's process ids,
and finds the process by the container's id in its cgroup.
"""

from __future__ import annotations

import json
import signal

from tests.cluster.apparatus.kubernetes_cluster import READY_S, ClusterUnderTest, Json

_KILL = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        group = open(f"/proc/{pid}/cgroup").read()
        lines = open(f"/proc/{pid}/status").read().splitlines()
    except OSError:
        continue
    numbers = next(line.split() for line in lines if line.startswith("NSpid:"))
    if sys.argv[1] in group and numbers[-1] == "1" and len(numbers) > 2:
        os.kill(int(pid), int(sys.argv[2]))
        sys.exit()
sys.exit("no first process of " + sys.argv[1])
"""


class NodeProcesses:
    """Access to the processes of the nodes, through one pod on each that is created when it is needed."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str) -> None:
        """`namespace` must admit privileged pods."""
        self._cluster, self._namespace = cluster, namespace
        self._nodes: set[str] = set()

    def prepare(self, node: str) -> None:
        """Start a pod on `node`, so that a later kill takes no longer than a request."""
        if node in self._nodes:
            return
        self._cluster.kubectl("apply", "-n", self._namespace, "-f", "-", text=json.dumps(_pod(node)))
        self._cluster.wait(
            "condition=Ready", f"pod/{_name(node)}", namespace=self._namespace, limit_s=READY_S
        )
        self._nodes.add(node)

    def kill_first(self, node: str, container_id: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of the container with this id, in the form `runtime://id`."""
        self.prepare(node)
        bare = container_id.rpartition("/")[2]
        inside = (
            "exec",
            "-n",
            self._namespace,
            _name(node),
            "--",
            "python3",
            "-c",
            _KILL,
            bare,
            str(int(signum)),
        )
        self._cluster.kubectl(*inside)


def _name(node: str) -> str:
    return f"processes-of-{node.replace('.', '-')}"


def _pod(node: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _name(node)},
        "spec": {
            "nodeName": node,
            "hostPID": True,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "processes",
                    "image": "holdfast-trainer:dev",
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "infinity"],
                    "securityContext": {"privileged": True, "runAsUser": 0},
                }
            ],
        },
    }
