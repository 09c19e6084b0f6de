"""A member reaches the supervisor but not its peers: a standby takes its ranks."""

from __future__ import annotations

import pytest

from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import RECOVERED_S, TrainingJob, container_id, example
from tests.cluster.nodes.test_lost_nodes import standby_is_ready

STEPS = 900
MASTER, WORKER = "gpt-master-0", "gpt-worker-0"
SIDECAR = "holdfast-sidecar"


@pytest.fixture(scope="module")
def job(installed: ClusterUnderTest, namespaces: Namespaces) -> TrainingJob:
    annotations = {"holdfast.dev/standby": "1"}
    found = example("pytorchjob.yaml", f"--steps={STEPS}", "--pace=0.05", annotations=annotations)
    made = TrainingJob(installed, namespaces.make("baseline"), found)
    made.start()
    made.trains()
    standby_is_ready(made)
    return made


def test_a_standby_replaces_a_member_that_its_peers_do_not_reach(
    job: TrainingJob, node_processes: NodeProcesses
) -> None:
    standby = standby_is_ready(job)
    before = job.observe()
    master, worker = job.pod(MASTER), job.pod(WORKER)
    node, container = worker["spec"]["nodeName"], container_id(worker, SIDECAR)
    node_processes.cut(node, container, master["status"]["podIP"])  # until its pod is evicted
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1)
    assert "is cut off: it and" in incident["why"]
    assert "do not reach each other" in incident["why"]
    assert incident["lost_steps"] <= 1
    assert job.rank_pod(1) == standby
    uid = worker["metadata"]["uid"]

    def is_replaced() -> bool | None:
        return True if uid not in {each["metadata"]["uid"] for each in job.pods()} else None

    job.until(is_replaced, "the pod that was cut off is replaced", RECOVERED_S)


def test_the_job_ends_with_the_weights_of_an_undisturbed_one(
    job: TrainingJob, installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    digest = job.digest()
    undisturbed = TrainingJob(
        installed, namespaces.make(), example("bare-pods.yaml", f"--steps={STEPS}", "--pace=0")
    )
    undisturbed.start()
    assert digest == undisturbed.digest()
