"""Signal the first process of a container, and cut a pod off from an address. No pod can do this to itself.

A privileged pod on the same node does it instead, which works on any cluster. This pod shares the node's
process ids, and finds the process by the container's id in its cgroup.
"""

from __future__ import annotations

import json
import signal

from tests.cluster.apparatus.kubernetes_cluster import READY_S, ClusterUnderTest, Json

_FIND = """
import os, sys
def first(container):
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        group = open(f"/proc/{pid}/cgroup").read()
        lines = open(f"/proc/{pid}/status").read().splitlines()
    except OSError:
        continue
    numbers = next(line.split() for line in lines if line.startswith("NSpid:"))
    if container in group and numbers[-1] == "1" and len(numbers) > 2:
        return int(pid)
  sys.exit("no first process of " + container)
"""

_SIGNAL = f"""{_FIND}
import time
found = first(sys.argv[1])
time.sleep(float(sys.argv[3]))
print(time.time(), flush=True)
os.kill(found, int(sys.argv[2]))
"""

# Adds or removes a route of the pod that drops all packets to an address. The image has no tool for this.
_ROUTE = f"""{_FIND}
import ctypes, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
network = os.open(f"/proc/{{first(sys.argv[1])}}/ns/net", os.O_RDONLY)
if libc.setns(network, 0x40000000):
    sys.exit(os.strerror(ctypes.get_errno()))
address = socket.inet_aton(sys.argv[3])
route = struct.pack("=8BI", socket.AF_INET, 32, 0, 0, 254, 4, 0, 6, 0)
route += struct.pack("=HH", 8, 1) + address
kind, flags = (24, 0x605) if sys.argv[2] == "cut" else (25, 5)
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
    kernel.bind((0, 0))
    kernel.send(struct.pack("=IHHII", 16 + len(route), kind, flags, 1, 0) + route)
    error = struct.unpack_from("=i", kernel.recv(4096), 16)[0]
if error:
    sys.exit(os.strerror(-error))
"""


class NodeProcesses:
    """Access to the processes on nodes, through one pod on each node that is created when it is needed."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str) -> None:
        """`namespace` must admit privileged pods."""
        self._cluster, self._namespace = cluster, namespace
        self._nodes: set[str] = set()

    def prepare(self, node: str) -> None:
        """Start a pod on `node`, so that a later kill takes no longer than a request."""
        if node in self._nodes and self._runs(node):
            return
        if node in self._nodes:  # it has ended together with the node
            self.forget(node)
        self._cluster.kubectl("apply", "-n", self._namespace, "-f", "-", text=json.dumps(_pod(node)))
        self._cluster.wait(
            "condition=Ready", f"pod/{_name(node)}", namespace=self._namespace, limit_s=READY_S
        )
        self._nodes.add(node)

    def forget(self, node: str) -> None:
        """Delete the pod on `node`, which has ended together with the node or was drained.

        The next use starts another one.
        """
        self._nodes.discard(node)
        words = ("--ignore-not-found", "--grace-period=0", "--force")
        self._cluster.kubectl("delete", "pod", _name(node), "-n", self._namespace, *words)

    def _runs(self, node: str) -> bool:
        pod = self._cluster.read(f"/api/v1/namespaces/{self._namespace}/pods/{_name(node)}")
        found = (pod.get("status") or {}).get("conditions") or ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in found)

    def kill_first(self, node: str, container_id: str) -> None:
        """Kill the first process of the container with this id, in the form `runtime://id`."""
        self.signal_first(node, container_id, signal.SIGKILL)

    def signal_first(
        self, node: str, container_id: str, signum: signal.Signals, delay_s: float = 0.0
    ) -> float:
        """Send a signal to the first process of a container, even one that it could ignore.

        Wait for `delay_s` after the process is found. Return when the signal was sent, by the node's clock.
        """
        return float(self._run(node, _SIGNAL, container_id, str(int(signum)), str(delay_s)))

    def cut(self, node: str, container_id: str, address: str) -> None:
        """Drop all packets that the pod of a container sends to an IPv4 address, until `heal`."""
        self._run(node, _ROUTE, container_id, "cut", address)

    def heal(self, node: str, container_id: str, address: str) -> None:
        self._run(node, _ROUTE, container_id, "heal", address)

    def _run(self, node: str, program: str, container_id: str, *words: str) -> str:
        self.prepare(node)
        bare = container_id.rpartition("/")[2]
        inside = ("exec", "-n", self._namespace, _name(node), "--", "python3", "-c", program, bare, *words)
        return self._cluster.kubectl(*inside)


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
