"""On a full cluster, an idle standby makes room for other pods, and one with ranks has the job's priority."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from supervisor.cluster.standbys.pod_requests import requests_of
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import RECOVERED_S, START_S, TrainingJob
from tests.cluster.conftest import refuse
from tests.cluster.nodes.test_planned import (
    DRAIN_S,
    NODES,
    millicores,
    moved,
    node_of,
    standby,
    started,
)

FREE_M = 50  # what the pods that fill the cluster leave free on each node; any pod here requests more
SCHEDULED_S = 60.0  # the scheduler tries again after at most 10 s, and a standby's pod takes a while to end


@pytest.fixture
def job(installed: ClusterUnderTest, namespaces: Namespaces) -> Iterator[TrainingJob]:
    """Yield a job that trains, with a standby that is ready, on a cluster that has no room left."""
    nodes = installed.read("/api/v1/nodes")["items"]
    if len(nodes) < NODES:
        refuse(f"the cluster has {len(nodes)} nodes; expected at least {NODES}")
    job = started(installed, namespaces, standby="1")
    job.trains()
    job.until(lambda: standby(job), "a standby is warm", START_S)
    fillers = namespaces.make("baseline")
    for node in nodes:
        fill(installed, fillers, node["metadata"]["name"])
    yield job
    namespaces.delete(fillers)
    namespaces.delete(job.namespace)


def sleeper(name: str, node: str, cpu_m: int) -> Json:
    """Return a pod without a priority class that requests `cpu_m` of the node."""
    container = {
        "name": "sleeps",
        "image": "holdfast-trainer:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": f"{cpu_m}m"}},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def create(cluster: ClusterUnderTest, namespace: str, pod: Json) -> None:
    cluster.kubectl("create", "-n", namespace, "-f", "-", text=json.dumps(pod))


def fill(cluster: ClusterUnderTest, namespace: str, node: str) -> None:
    free = millicores(cluster.read(f"/api/v1/nodes/{node}")["status"]["allocatable"]["cpu"])
    for each in cluster.read(f"/api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]:
        if each["status"]["phase"] in ("Succeeded", "Failed"):
            continue
        free -= requests_of(each).get("cpu", 0)
    if free > FREE_M:
        create(cluster, namespace, sleeper(f"fills-{node}", node, free - FREE_M))


def is_scheduled(cluster: ClusterUnderTest, namespace: str, name: str) -> str:
    """Return the status of the pod's condition PodScheduled; "" if it has none."""
    status = cluster.read(f"/api/v1/namespaces/{namespace}/pods/{name}").get("status") or {}
    found = (each for each in status.get("conditions") or () if each["type"] == "PodScheduled")
    return next((str(each["status"]) for each in found), "")


def said(job: TrainingJob, reason: str) -> list[str]:
    """Return the messages of the Supervision's events with this reason."""
    events = job.cluster.read(f"/api/v1/namespaces/{job.namespace}/events")["items"]
    return [str(each["message"]) for each in events if each["reason"] == reason]


def test_an_idle_standby_makes_room_for_another_pod(
    job: TrainingJob, installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    before, spare = job.observe(), job.until(lambda: standby(job), "a standby is warm", START_S)
    node, cost = node_of(job, spare), job.status()["standbys"]
    assert (cost["wanted"], cost["ready"], cost["summary"]) == (1, 1, "1/1")
    assert cost["pods"] == [{"name": spare, "node": node, "state": "idle"}]
    assert float(cost["cores"]) > 0
    other = namespaces.make("baseline")
    create(installed, other, sleeper("other", node, 200))
    job.until(lambda: is_scheduled(installed, other, "other") == "True" or None, "room is made", SCHEDULED_S)
    job.until(lambda: said(job, "StandbyYielded"), "the event is recorded", SCHEDULED_S)
    [message] = said(job, "StandbyYielded")
    assert message == f"standby {spare} on node {node} yields to pod {other}/other, which lacks cpu"
    job.trains()
    after = job.observe()
    assert (after.generation, after.incidents) == (before.generation, before.incidents)
    assert [each["metadata"]["name"] for each in job.pods() if "standby" in each["metadata"]["name"]] == []
    job.until(lambda: job.status()["standbys"]["problem"] or None, "the status tells why", RECOVERED_S)
    assert job.status()["standbys"]["ready"] == 0
    namespaces.delete(other)
    job.until(lambda: standby(job), "a standby is warm again", START_S)


def test_the_owners_new_pod_does_not_preempt_a_standby_with_ranks(
    job: TrainingJob, installed: ClusterUnderTest
) -> None:
    """The node stays cordoned, so that there is no room for the pod that the Job creates."""
    before, victim = job.observe(), job.rank_pod(1)
    node, names = node_of(job, victim), {each["metadata"]["name"] for each in job.pods()}
    only = "--pod-selector=batch.kubernetes.io/job-name=gpt"
    selected = (only, "--ignore-daemonsets", "--delete-emptydir-data")
    try:
        installed.kubectl("drain", node, *selected, f"--timeout={DRAIN_S:.0f}s", limit_s=DRAIN_S + 10)
        moved(job, 1, before)
        promoted = job.rank_pod(1)
        uid = job.pod(promoted)["metadata"]["uid"]

        def refused() -> str | None:
            new = [each["metadata"]["name"] for each in job.pods()]
            lacking = (each for each in new if each not in names)
            return next(
                (each for each in lacking if is_scheduled(installed, job.namespace, each) == "False"), None
            )

        job.until(refused, "the Job's new pod finds no room", SCHEDULED_S)
        step = job.step()
        job.reaches(step + 200)
        assert refused(), "the new pod has found room"
        after = job.observe()
        assert after.pods[promoted] == uid
        assert after.incidents == before.incidents + 1
        assert job.rank_pod(1) == promoted
        priorities = {each["spec"]["priority"] for each in job.pods()}
        assert len(priorities) == 1
        states = {each["name"]: each["state"] for each in job.status()["standbys"]["pods"]}
        assert states == {promoted: "has ranks"}
    finally:
        installed.kubectl("uncordon", node)
