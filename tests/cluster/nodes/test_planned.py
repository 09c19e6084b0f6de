"""A member that is about to end moves to a standby before it ends, and no step is repeated.

Each test ends the member of one rank in a different way. The nodes are cordoned or tainted only during a
test, and only pods of the test's job are drained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import START_S, TrainingJob, example, pods_in
from tests.cluster.conftest import refuse

STEPS = 1500
NODES = 3
DRAIN_S = 120.0
TAINT = "holdfast.dev/test-planned"
PRIORITY = "holdfast-test-planned"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_APART = {"labelSelector": {"matchLabels": {"app": "gpt"}}, "topologyKey": "kubernetes.io/hostname"}


def started(
    cluster: ClusterUnderTest, namespaces: Namespaces, steps: int = STEPS, **annotations: str
) -> TrainingJob:
    given = {f"holdfast.dev/{name}": text for name, text in annotations.items()}
    found = example("job.yaml", f"--steps={steps}", "--pace=0.05", annotations=given)
    for pod in pods_in(found):
        pod["spec"]["affinity"] = {"podAntiAffinity": {_REQUIRED: [_APART]}}
    job = TrainingJob(cluster, namespaces.make("baseline"), found)
    job.start()
    return job


@pytest.fixture(scope="module")
def undisturbed(installed: ClusterUnderTest, namespaces: Namespaces) -> TrainingJob:
    return started(installed, namespaces)


@pytest.fixture
def job(
    installed: ClusterUnderTest, namespaces: Namespaces, undisturbed: TrainingJob
) -> Iterator[TrainingJob]:
    """Yield a job that trains, with a standby that is ready on a third node."""
    nodes = installed.read("/api/v1/nodes")["items"]
    if len(nodes) < NODES:
        refuse(f"the cluster has {len(nodes)} nodes; expected at least {NODES}")
    job = started(installed, namespaces, standby="1")
    job.trains()
    job.until(lambda: standby(job), "a standby is warm", START_S)
    yield job
    job.unfollow()
    namespaces.delete(job.namespace)


def standby(job: TrainingJob) -> str | None:
    """Return the pod of a warm member without ranks."""
    for member in job.view().get("members", ()):
        if member["role"] == "standby" and member["connected"] and member["parked"]:
            return str(member["name"]).partition(".")[0]
    return None


def node_of(job: TrainingJob, pod: str) -> str:
    return str(job.pod(pod)["spec"]["nodeName"])


def moved(job: TrainingJob, rank: int, before: object) -> Json:
    """Wait for the swap, print how long it took, and check what it cost."""
    incident = job.recovered(before)  # type: ignore[arg-type]
    print(  # noqa: T201
        f"{incident['why']}: without training for {incident['recovered_s']:.2f} s; {incident['timeline']}"
    )
    assert (incident["kind"], incident["remedy"], incident["rank"]) == ("departure", "swap", rank), incident
    assert incident["lost_steps"] == 0
    assert job.rank_pod(rank).startswith("gpt-standby-")
    return incident


def no_step_is_repeated(printed: list[int]) -> None:
    """A rank may be stopped after its peers have completed a step, and before it prints it."""
    assert printed == sorted(set(printed)), "a step was repeated"
    assert len(printed) >= printed[-1] - printed[0], "more than one step is missing"


def test_a_drained_node_costs_no_step(
    job: TrainingJob, installed: ClusterUnderTest, undisturbed: TrainingJob
) -> None:
    before, watched, victim = job.observe(), job.rank_pod(0), job.rank_pod(1)
    node = node_of(job, victim)
    only = "--pod-selector=batch.kubernetes.io/job-name=gpt"
    selected = (only, "--ignore-daemonsets", "--delete-emptydir-data")
    job.follow(watched)
    try:
        installed.kubectl("drain", node, *selected, f"--timeout={DRAIN_S:.0f}s", limit_s=DRAIN_S + 10)
        moved(job, 1, before)
    finally:
        installed.kubectl("uncordon", node)
    digest, steps = job.digest(), job.followed_steps()
    no_step_is_repeated(steps)
    assert steps[-1] >= STEPS - 1
    assert digest == undisturbed.digest()


def test_a_taint_moves_rank_0_before_its_pod_is_deleted(
    job: TrainingJob, installed: ClusterUnderTest, undisturbed: TrainingJob
) -> None:
    before, victim = job.observe(), job.rank_pod(0)
    node = node_of(job, victim)
    job.follow(victim)
    installed.kubectl("taint", "node", node, f"{TAINT}=:NoExecute")
    try:
        moved(job, 0, before)
        after = job.rank_pod(0)
    finally:
        installed.kubectl("taint", "node", node, f"{TAINT}-")
    digest = job.digest()
    earlier, later = job.followed_steps(), job.steps(after)
    no_step_is_repeated([*earlier, *later])
    assert digest == undisturbed.digest()


def test_a_pod_of_a_higher_priority_costs_no_step(
    job: TrainingJob, installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    before, victim = job.observe(), job.rank_pod(1)
    node = node_of(job, victim)
    installed.kubectl("create", "priorityclass", PRIORITY, "--value=1000000")
    pod, there = preemptor(installed, job, node), namespaces.make("baseline")
    try:
        installed.kubectl("create", "-n", there, "-f", "-", text=json.dumps(pod))
        moved(job, 1, before)
    finally:
        installed.kubectl("delete", "priorityclass", PRIORITY)
        installed.kubectl("delete", "pod", "preemptor", "-n", there, "--wait=false")  # others need the room


def preemptor(cluster: ClusterUnderTest, job: TrainingJob, node: str) -> Json:
    """Return a pod that fits on the node only without the job's pod."""
    free = millicores(cluster.read(f"/api/v1/nodes/{node}")["status"]["allocatable"]["cpu"])
    for each in cluster.read(f"/api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]:
        has_ended = each["status"].get("phase") in ("Succeeded", "Failed")  # its requests no longer count
        if each["metadata"]["namespace"] != job.namespace and not has_ended:
            containers = [*each["spec"]["containers"], *each["spec"].get("initContainers", ())]
            asked = ((each.get("resources") or {}).get("requests") or {} for each in containers)
            free -= sum(millicores(each.get("cpu", "0")) for each in asked)
    container = {
        "name": "sleeps",
        "image": "holdfast-trainer:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": f"{free}m"}},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "priorityClassName": PRIORITY,
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "preemptor"}, "spec": spec}


def millicores(text: str) -> int:
    return int(text[:-1]) if text.endswith("m") else int(float(text) * 1000)
