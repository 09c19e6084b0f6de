"""Give a cluster's node agents GPUs that can fail, and measure the time from an Xid to the Node's condition.

A stand-in for NVML, which a ConfigMap adds to the agents' pods, simulates the GPUs. The quarantine's dry run
is switched off, because a dry run moves no member. Both changes are undone on exit from the context.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.errors import BadInput
from nodeagent.publishing.conditions import GPU, TRAINING
from tests.cluster.apparatus.dry_run import SETTINGS, has_settings, without_dry_run
from tests.cluster.apparatus.fake_gpus import FAKE, break_in
from tests.cluster.apparatus.kubernetes_cluster import (
    AGENT,
    NODES,
    ClusterUnderTest,
    Json,
)
from tests.fakenvml import build

READY_S = 180.0
VERDICT_S = 30.0
POLL_S = 0.02
_XID = (
    "import sys; from pathlib import Path; from tests.fakenvml.state import Fake; "
    "fake = Fake.existing(Path('/fake/state/nvml')); sys.stdout.write('now\\n'); sys.stdout.flush(); "
    "fake.xid(0, 79)"
)


@dataclass(frozen=True, slots=True)
class FakeGpus:
    """The agents' fake GPUs, within the context of `fake_gpus`."""

    cluster: ClusterUnderTest

    def fail(self, node: str) -> tuple[float, float]:
        """Raise Xid 79 on a node. Return the times of the Xid and of the Node's new condition."""
        pod = self._agent(node)
        words = ("kubectl", "exec", "-n", NODES, pod, "-c", "nodeagent", "--", "python", "-c", _XID)
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            at_s = time.monotonic()
            assert line == "now\n", f"the GPU of {node} did not fail: {process.poll()}"
            deadline_s = at_s + VERDICT_S
            while training_health(self.cluster.read(f"/api/v1/nodes/{node}")) != "False":
                assert time.monotonic() < deadline_s, f"no verdict on {node} within {VERDICT_S:g} s"
                time.sleep(POLL_S)
            return at_s, time.monotonic()

    def heal(self, node: str) -> None:
        """Give a node different GPUs, and wait until it is healthy and untainted."""
        self.cluster.kubectl("delete", "pod", self._agent(node), "-n", NODES, "--wait=true")
        self.await_health(node)

    def await_health(self, node: str) -> None:
        """Wait until a node's agent reports it as healthy."""

        def look() -> bool | None:
            found = conditions(self.cluster.read(f"/api/v1/nodes/{node}"))
            return True if (found.get(GPU), found.get(TRAINING)) == ("True", "True") else None

        self.cluster.until(look, f"node {node} is healthy", NODES, READY_S)

    def _agent(self, node: str) -> str:
        pods = self.cluster.read(f"/api/v1/namespaces/{NODES}/pods?fieldSelector=spec.nodeName={node}")
        newest = max(pods["items"], key=lambda each: str(each["metadata"]["creationTimestamp"]))
        return str(newest["metadata"]["name"])


def conditions(node: Json) -> dict[str, str]:
    """Return the status of each condition of a Node."""
    return {each["type"]: each["status"] for each in (node.get("status") or {}).get("conditions") or ()}


def training_health(node: Json) -> str:
    """Return what a Node's condition says about its fitness to train; "" if it says nothing."""
    return conditions(node).get(TRAINING, "")


def require_fake_gpus(cluster: ClusterUnderTest) -> None:
    """Check what `fake_gpus` needs.

    Raises `BadInput` if this machine has no C compiler, or if the quarantine has settings, which `fake_gpus`
    would have to replace.
    """
    if has_settings(cluster):
        raise BadInput(f"--verdicts: the ConfigMap {SETTINGS} exists; delete it, or use --verdicts 0")
    try:
        build.build()
    except build.NoCompiler as error:
        raise BadInput(f"--verdicts: {error}") from error


@contextmanager
def fake_gpus(cluster: ClusterUnderTest, nodes: list[str]) -> Iterator[FakeGpus]:
    """Yield the fake GPUs of the nodes once all are healthy. Raises as `require_fake_gpus` does."""
    require_fake_gpus(cluster)
    found = FakeGpus(cluster)
    with without_dry_run(cluster):
        try:
            break_in(cluster)
            for node in nodes:
                found.await_health(node)
            yield found
        finally:
            cluster.attempt("rollout", "undo", f"daemonset/{AGENT}", "-n", NODES)
            cluster.attempt("delete", "configmap", FAKE, "-n", NODES, "--ignore-not-found")
