"""A node loses its power: a standby pod takes over, and the owner's pods end as if nothing had happened.

`HOLDFAST_NODE_KILL` and `HOLDFAST_NODE_START` are commands that, followed by a node's name, end everything on
the node at once and boot it again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.kubernetes_cluster import SYSTEM, ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import START_S, TrainingJob, example
from tests.cluster.conftest import refuse

STEPS = 1500
READY_S = 120.0
NODES = 3


def commands() -> tuple[list[str], list[str]]:
    """Return the commands that kill a node and start it. Without them, skip; in CI, fail."""
    names = ("HOLDFAST_NODE_KILL", "HOLDFAST_NODE_START")
    words = [shlex.split(os.environ.get(name, "")) for name in names]
    if not all(words):
        refuse(f"set {' and '.join(names)} to commands that kill a node of the cluster, and start it")
    return words[0], words[1]


class Nodes:
    """The nodes of the cluster, each of which can be killed and started."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self._cluster = cluster
        self._kill, self._start = commands()
        self._killed: list[str] = []

    def kill(self, node: str) -> None:
        """End everything on the node at once."""
        self._killed.append(node)
        subprocess.run([*self._kill, node], check=True)

    def start_all(self) -> None:
        """Start all nodes that were killed, and wait until they are ready."""
        for node in self._killed:
            subprocess.run([*self._start, node], check=True)
        while self._killed:
            ready = ("wait", "--for=condition=Ready", f"node/{self._killed[-1]}", f"--timeout={READY_S:.0f}s")
            self._cluster.kubectl(*ready, limit_s=READY_S + 10)
            self._killed.pop()


@pytest.fixture(scope="module")
def nodes(installed: ClusterUnderTest) -> Iterator[Nodes]:
    """Yield the nodes of a cluster that has enough of them, and start them all again at the end."""
    found = Nodes(installed)
    count = len(installed.read("/api/v1/nodes")["items"])
    if count < NODES:
        refuse(f"the cluster has {count} nodes; expected at least {NODES}")
    yield found
    found.start_all()


@pytest.fixture(scope="module")
def undisturbed_digest(installed: ClusterUnderTest, namespaces: Namespaces) -> str:
    """Return the digest of an undisturbed run, which ends before any node is lost.

    A webhook on a lost node would not inject it, and the scheduler could choose that node.
    """
    found = example("bare-pods.yaml", f"--steps={STEPS}", "--pace=0")
    undisturbed = TrainingJob(installed, namespaces.make(), found)
    undisturbed.start()
    return undisturbed.digest()


@pytest.fixture(scope="module")
def job_with_standby(
    installed: ClusterUnderTest, namespaces: Namespaces, undisturbed_digest: str
) -> TrainingJob:
    assert undisturbed_digest
    found = example(
        "pytorchjob.yaml", f"--steps={STEPS}", "--pace=0.05", annotations={"holdfast.dev/standby": "1"}
    )
    job = TrainingJob(installed, namespaces.make("baseline"), found)
    job.start()
    job.trains()
    standby_is_ready(job)
    return job


def standby_is_ready(job: TrainingJob) -> str:
    """Wait for a warm member without ranks, and return the name of its pod."""

    def look() -> str | None:
        for member in job.view().get("members", ()):
            if member["role"] == "standby" and member["connected"] and member["parked"]:
                return str(member["name"]).partition(".")[0]
        return None

    found: str = job.until(look, "a standby is warm", START_S)
    return found


def node_of(job: TrainingJob, pod: str) -> str:
    return str(job.pod(pod)["spec"]["nodeName"])


def test_a_standby_is_on_a_node_without_a_member(job_with_standby: TrainingJob) -> None:
    job = job_with_standby
    standby = standby_is_ready(job)
    members = {node_of(job, job.rank_pod(rank)) for rank in (0, 1)}
    assert node_of(job, standby) not in members
    assert len({each["spec"]["priority"] for each in job.pods()}) == 1


def test_a_standby_takes_over_when_a_node_loses_its_power(
    job_with_standby: TrainingJob, installed: ClusterUnderTest, nodes: Nodes
) -> None:
    job = job_with_standby
    standby = standby_is_ready(job)
    leader = {
        str(each["spec"].get("nodeName"))
        for each in installed.read(
            f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/component=supervisor"
        )["items"]
    }
    ranks = [rank for rank in (0, 1) if node_of(job, job.rank_pod(rank)) not in leader]
    victim = ranks[-1]
    before = job.observe()
    node = node_of(job, job.rank_pod(victim))
    nodes.kill(node)
    incident = job.recovered(before)
    assert incident["kind"] == "member_lost"
    assert incident["lost_steps"] <= 1
    assert job.rank_pod(victim) == standby


def test_the_job_ends_with_the_weights_of_an_undisturbed_one(
    job_with_standby: TrainingJob, undisturbed_digest: str
) -> None:
    assert job_with_standby.digest() == undisturbed_digest


def test_the_owner_succeeds_once_the_node_is_back(job_with_standby: TrainingJob, nodes: Nodes) -> None:
    """The operator creates the lost pod again, which ends at once with the exit code of the finished run."""
    nodes.start_all()

    def succeeded() -> bool | None:
        conditions = job_with_standby.owner().get("conditions", ())
        kinds = {each["type"]: each["status"] for each in conditions}
        return True if kinds.get("Succeeded") == "True" else None

    job_with_standby.until(succeeded, "the PyTorchJob has succeeded", READY_S)
    assert job_with_standby.status()["generation"] == 2
