"""A whole node is lost or cut off, or seems to be. Only a host that is really lost costs a restart.

The job's master trains on the supervisor's node. Its worker, which has rank 1, trains on the node that is
disturbed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.apparatus.kubernetes_cluster import (
    READY_S,
    SUPERVISOR,
    SYSTEM,
    ClusterUnderTest,
    Json,
    leader,
)
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import (
    RECOVERED_S,
    Observed,
    TrainingJob,
    container_id,
    example,
)
from tests.cluster.conftest import refuse

STEPS = 900
MASTER, WORKER = "gpt-master-0", "gpt-worker-0"
SIDECAR = "holdfast-sidecar"
MEMBER_TIMEOUT_S = 30.0  # the default: without probes of the host, detection would take this long
OUT_OF_REACH_S = 40.0  # longer than that
STOPPED_S = 10.0
NOTICED_S = 15.0  # far less than `MEMBER_TIMEOUT_S` even on a busy machine; usually 3.5 s


_LOST = re.compile(rf'"why": "member {WORKER}[^"]* is lost')


@pytest.fixture(scope="module")
def do() -> Callable[[str, str], None]:
    """Return a function that cuts, heals, kills or starts a node, according to its first argument."""
    names = {what: f"HOLDFAST_NODE_{what.upper()}" for what in ("cut", "heal", "kill", "start")}
    words = {what: shlex.split(os.environ.get(name, "")) for what, name in names.items()}
    if not all(words.values()):
        refuse(f"set {', '.join(names.values())} to commands that do this to the node that is their argument")

    def act(what: str, node: str) -> None:
        subprocess.run([*words[what], node], check=True, capture_output=True)

    return act


@pytest.fixture(scope="module")
def home(installed: ClusterUnderTest) -> str:
    """Return the node of the leading supervisor."""
    pod = installed.until(lambda: leader(installed) or None, "a supervisor leads", SYSTEM, READY_S)
    found: str = installed.read(f"/api/v1/namespaces/{SYSTEM}/pods/{pod}")["spec"]["nodeName"]
    return found


@pytest.fixture(scope="module")
def away(installed: ClusterUnderTest, home: str) -> str:
    """Return another node, which may be lost."""

    def is_ready(node: Json) -> bool:
        found = [each["status"] for each in node["status"].get("conditions", ()) if each["type"] == "Ready"]
        return found == ["True"] and not node["spec"].get("unschedulable")

    ready = [node["metadata"]["name"] for node in installed.read("/api/v1/nodes")["items"] if is_ready(node)]
    others: list[str] = [name for name in ready if name != home]
    return others[-1] if others else refuse("a cluster of two nodes is needed")


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
def far_job(
    installed: ClusterUnderTest, namespaces: Namespaces, home: str, away: str, undisturbed_digest: str
) -> Iterator[TrainingJob]:
    assert undisturbed_digest
    objects = example("pytorchjob.yaml", f"--steps={STEPS}", "--pace=0.1")
    replicas = objects[-1]["spec"]["pytorchReplicaSpecs"]
    for kind, node in (("Master", home), ("Worker", away)):
        replicas[kind]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    job = TrainingJob(installed, namespaces.make("baseline"), objects)
    job.start()
    job.trains()
    job.supervised_by(0)
    job.follow(MASTER)
    yield job
    job.unfollow()


def supervisors(cluster: ClusterUnderTest) -> list[str]:
    """Return the addresses of all supervisors."""
    labels = f"app.kubernetes.io%2Fcomponent%3D{SUPERVISOR.removeprefix('holdfast-')}"
    found = cluster.read(f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector={labels}")["items"]
    return [pod["status"]["podIP"] for pod in found if pod["status"].get("podIP")]


def is_connected(job: TrainingJob) -> bool | None:
    """Return True if the status shows that all members with ranks are connected."""
    there = [each["connected"] for each in job.view().get("members", ()) if each["ranks"]]
    return True if there and all(there) else None


def unchanged(job: TrainingJob, before: Observed) -> None:
    """Check that nothing has happened to the job except that it trains."""
    after = job.observe()
    assert (after.generation, after.incidents, after.pods, after.restarts) == (
        before.generation,
        before.incidents,
        before.pods,
        before.restarts,
    )


def losses(cluster: ClusterUnderTest) -> int:
    """Return how often the supervisor has decided that the member of rank 1 is lost, according to its log."""
    return len(_LOST.findall(cluster.log(SYSTEM, leader(cluster), "supervisor")))


def test_a_member_that_only_the_supervisor_does_not_reach_trains_undisturbed(
    far_job: TrainingJob, installed: ClusterUnderTest, away: str, node_processes: NodeProcesses
) -> None:
    before = far_job.observe()
    container = container_id(far_job.pod(WORKER), SIDECAR)
    addresses = supervisors(installed)
    for address in addresses:
        node_processes.cut(away, container, address)
    try:
        first = far_job.step()
        time.sleep(OUT_OF_REACH_S)  # the subject of this test
        far_job.reaches(first + 50)
    finally:
        for address in addresses:
            node_processes.heal(away, container, address)
    unchanged(far_job, before)
    far_job.until(lambda: is_connected(far_job), "the member has connected again", RECOVERED_S)
    far_job.trains()
    unchanged(far_job, before)


def test_a_stopped_sidecar_is_no_lost_host(
    far_job: TrainingJob, away: str, node_processes: NodeProcesses
) -> None:
    before = far_job.observe()
    container = container_id(far_job.pod(WORKER), SIDECAR)
    node_processes.signal_first(away, container, signal.SIGSTOP)
    try:
        time.sleep(STOPPED_S)  # the subject of this test
    finally:
        node_processes.signal_first(away, container, signal.SIGCONT)
    far_job.until(lambda: is_connected(far_job), "the member reports again", RECOVERED_S)
    far_job.trains()
    unchanged(far_job, before)


@pytest.mark.parametrize(("lose", "restore"), [("cut", "heal"), ("kill", "start")])
def test_a_lost_host_is_noticed_within_seconds(
    far_job: TrainingJob,
    installed: ClusterUnderTest,
    away: str,
    do: Callable[[str, str], None],
    lose: str,
    restore: str,
) -> None:
    """A node that is cut off is silent. If only its processes are killed, its kernel may still answer probes.

    The connections are then closed and the other ranks lose their peer, so the group stops at once.
    """
    before = far_job.observe()
    known = losses(installed)

    def look() -> bool | None:
        return True if losses(installed) > known else None

    try:
        do(lose, away)
        since_s = time.monotonic()
        far_job.until(look, "the loss is noticed", MEMBER_TIMEOUT_S + RECOVERED_S)
        took_s = time.monotonic() - since_s
    finally:
        do(restore, away)
    incident = far_job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
    assert lose == "kill" or "its host has not answered" in incident["why"]
    assert lose == "kill" or took_s < NOTICED_S, json.dumps(incident["timeline"])
    assert far_job.observe().pods[MASTER] == before.pods[MASTER]


def test_the_disturbed_job_ends_with_the_weights_of_an_undisturbed_one(
    far_job: TrainingJob, undisturbed_digest: str
) -> None:
    assert far_job.digest() == undisturbed_digest
