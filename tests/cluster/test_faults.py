"""A job survives each kind of fault in a cluster, with at most one new generation and one lost step.

Most tests break the same job, one after another. They break rank 1 and its pod, so that the log of rank 0
shows each step of the whole run.
"""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest

from tests.cluster.apparatus.absent_webhook import absent_webhook
from tests.cluster.apparatus.kubernetes_cluster import (
    PROGRAMS,
    READY_S,
    SYSTEM,
    ClusterUnderTest,
    Json,
    leader,
)
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import (
    RECOVERED_S,
    TrainingJob,
    container_id,
    example,
    restarts,
    statuses,
)

NOTICED_S = 120.0  # the supervisor looks once a minute for pods that are not injected
SIDECAR = "holdfast-sidecar"
POD, OTHER = "gpt-1", "gpt-0"  # the pods of ranks 1 and 0


@pytest.fixture(scope="session")
def missed(installed: ClusterUnderTest, namespaces: Namespaces) -> Json:
    """Return a pod that opted in while no webhook was running."""
    namespace = namespaces.make()
    pod = example("bare-pods.yaml")[0]
    pod["spec"]["containers"][0].update(command=["sleep"], args=["infinity"])
    with absent_webhook(installed):
        created = installed.kubectl("create", "-n", namespace, "-o", "json", "-f", "-", text=json.dumps(pod))
    found: Json = json.loads(created)
    return found


@pytest.fixture
def lead(installed: ClusterUnderTest) -> str:
    """Return the pod of the leading supervisor."""

    def look() -> str | None:
        return leader(installed) or None

    return installed.until(look, "a supervisor leads", SYSTEM, READY_S)


def force_delete(cluster: ClusterUnderTest, namespace: str, pod: str) -> None:
    cluster.kubectl("delete", "pod", pod, "-n", namespace, "--grace-period=0", "--force")


def test_a_pod_that_the_webhook_missed_runs_unsupervised(missed: Json, installed: ClusterUnderTest) -> None:
    """A missing installation does not hold up the training."""
    namespace, name = missed["metadata"]["namespace"], missed["metadata"]["name"]
    assert "initContainers" not in missed["spec"]
    assert "holdfast.dev/member" not in missed["metadata"]["labels"]
    installed.wait("condition=Ready", f"pod/{name}", namespace=namespace)


@pytest.mark.parametrize(
    ("signum", "kind"), [(signal.SIGKILL, "crash"), (signal.SIGSTOP, "hang")], ids=["killed", "stopped"]
)
def test_a_rank_is_replaced_in_its_container(job: TrainingJob, signum: int, kind: str) -> None:
    before = job.observe()
    job.signal_rank(1, signum, POD)
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == (kind, 1), incident["why"]
    after = job.observe()
    assert (after.pods, after.restarts) == (before.pods, before.restarts)


def test_a_deleted_pod_is_replaced_by_its_successor(job: TrainingJob) -> None:
    before = job.observe()
    job.cluster.kubectl("delete", "pod", POD, "-n", job.namespace, "--wait=false")
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
    only_pod_changed(job, before.pods)


def only_pod_changed(job: TrainingJob, before: object) -> None:
    after = job.observe()
    assert isinstance(before, dict)
    assert after.pods.keys() == before.keys()
    assert [name for name in before if before[name] != after.pods[name]] == [POD]
    assert after.restarts == {}


def test_a_killed_sidecar_costs_nothing(job: TrainingJob, node_processes: NodeProcesses) -> None:
    pod = job.pod(POD)
    node_processes.prepare(pod["spec"]["nodeName"])
    before = job.observe()
    node_processes.kill_first(pod["spec"]["nodeName"], container_id(pod, SIDECAR))

    def look() -> bool | None:
        found = next(each for each in statuses(job.pod(POD)) if each["name"] == SIDECAR)
        return True if found["restartCount"] == 1 and "running" in found["state"] else None

    job.until(look, "the kubelet has started the sidecar again", RECOVERED_S)
    job.trains()
    after = job.observe()
    assert (after.generation, after.incidents, after.pods) == (
        before.generation,
        before.incidents,
        before.pods,
    )
    assert after.restarts == {**before.restarts, f"{POD}/{SIDECAR}": 1}


def test_a_rank_of_the_new_sidecar_is_replaced_too(job: TrainingJob) -> None:
    """This shows that it has found the launcher, the ranks and the snapshots of its predecessor."""
    before = job.observe()
    job.signal_rank(1, signal.SIGKILL, POD)
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("crash", 1), incident["why"]
    assert incident["resume"]["source"] in ("slot", "peer"), incident["resume"]


def test_a_killed_launcher_comes_back_as_another_member(
    job: TrainingJob, node_processes: NodeProcesses
) -> None:
    """Its ranks end with their first process. The kubelet starts the container again in the same pod."""
    pod = job.pod(POD)
    before = job.observe()
    node_processes.kill_first(pod["spec"]["nodeName"], container_id(pod, job.container))
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
    after = job.observe()
    assert after.pods == before.pods
    assert after.restarts == {**before.restarts, f"{POD}/{job.container}": 1}


def test_training_runs_on_without_a_supervisor_and_the_next_one_adopts_it(
    job: TrainingJob, installed: ClusterUnderTest, lead: str
) -> None:
    before = job.observe()
    force_delete(installed, SYSTEM, lead)
    job.trains()
    job.supervised_by(before.epoch)
    job.trains()
    after = job.observe()
    assert (after.generation, after.incidents) == (before.generation, before.incidents)
    assert (after.pods, after.restarts) == (before.pods, before.restarts)


def test_the_next_supervisor_finishes_a_recovery(
    job: TrainingJob, installed: ClusterUnderTest, lead: str
) -> None:
    """The supervisor is deleted while the job waits for the successor of a deleted pod."""
    before = job.observe()
    job.cluster.kubectl("delete", "pod", POD, "-n", job.namespace, "--wait=false")

    def look() -> str | None:
        phase = job.status().get("phase")
        return phase if phase != "running" else None

    phase = job.until(look, "the supervisor has begun to recover the job", RECOVERED_S)
    force_delete(installed, SYSTEM, lead)
    assert phase != "ended"
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
    only_pod_changed(job, before.pods)
    assert job.observe().epoch > before.epoch


def test_an_update_of_both_programs_disturbs_no_training(
    job: TrainingJob, installed: ClusterUnderTest
) -> None:
    before = job.observe()
    installed.kubectl("rollout", "restart", "-n", SYSTEM, *(f"deployment/{each}" for each in PROGRAMS))
    for each in PROGRAMS:
        installed.kubectl("rollout", "status", "-n", SYSTEM, f"deployment/{each}", limit_s=READY_S)
    job.supervised_by(before.epoch)
    job.trains()
    after = job.observe()
    assert (after.generation, after.incidents) == (before.generation, before.incidents)
    assert (after.pods, after.restarts) == (before.pods, before.restarts)


def test_a_rank_is_replaced_by_the_next_supervisor(job: TrainingJob) -> None:
    """This shows that it has all of the job's state, and that the members obey it."""
    before = job.observe()
    job.signal_rank(1, signal.SIGKILL, POD)
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("crash", 1), incident["why"]


def test_no_step_was_skipped_and_each_incident_repeated_at_most_one(job: TrainingJob) -> None:
    """Rank 0 prints each step, so a step that was lost and repeated is printed twice.

    It prints a step after its commit. A restart between the two keeps the step and loses the line, once for
    each incident at most.
    """
    steps, incidents = job.steps(OTHER), job.observe().incidents
    unprinted = set(range(max(steps) + 1)) - set(steps)
    assert len(unprinted) <= incidents, sorted(unprinted)
    again = sum(Counter(steps).values()) - len(set(steps))
    assert again <= incidents
    assert OTHER not in {each.partition("/")[0] for each in restarts(job.pods())}


def not_injected(pod: Json, cluster: ClusterUnderTest) -> Json:
    """Return the event that explains why the pod is not injected."""
    namespace, uid = pod["metadata"]["namespace"], pod["metadata"]["uid"]
    path = f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.uid={uid}"

    def look() -> Json | None:
        found = [each for each in cluster.read(path)["items"] if each["reason"] == "NotInjected"]
        return found[0] if found else None

    event: Json = cluster.until(look, "the supervisor says why a pod is not injected", namespace, NOTICED_S)
    assert event["type"] == "Warning"
    assert event["source"]["component"] == "holdfast-supervisor"
    return event


def test_an_event_reports_that_the_webhook_missed_a_pod(missed: Json, installed: ClusterUnderTest) -> None:
    assert "unsupervised" in not_injected(missed, installed)["message"]


def test_an_event_reports_why_the_webhook_refused_a_pod(
    installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    pod = example("bare-pods.yaml", annotations={"holdfast.dev/hang-flor": "5s"})[0]
    create = ("create", "-n", namespaces.make(), "-o", "json", "-f", "-")
    created: Json = json.loads(installed.kubectl(*create, text=json.dumps(pod)))
    why = created["metadata"]["annotations"]["holdfast.dev/not-injected"]
    assert "unknown annotation" in why
    assert not_injected(created, installed)["message"] == why


def test_a_webhook_that_has_come_back_injects_pods_again(missed: Json, installed: ClusterUnderTest) -> None:
    namespace = missed["metadata"]["namespace"]
    pod = example("bare-pods.yaml")[1]
    dry = ("create", "--dry-run=server", "-n", namespace, "-o", "json", "-f", "-")
    created = json.loads(installed.kubectl(*dry, text=json.dumps(pod)))
    assert [each["name"] for each in created["spec"]["initContainers"]] == ["holdfast-setup", SIDECAR]
