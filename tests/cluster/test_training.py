"""The examples train to their end, supervised and under torchrun, and all end with the same weights.

Most of them start together. The examples in the guides start one by one, after the others have ended.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from supervisor.admission import pod_layout
from tests.cluster.apparatus.kubernetes_cluster import EXAMPLES, ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import (
    RECOVERED_S,
    SUMMARY_S,
    TRAINED_S,
    TrainingJob,
    example,
    pods_in,
    restarts,
)
from tests.cluster.conftest import refuse

STEPS = 300
KILL_AT = 20
OPTIONS = (f"--steps={STEPS}", "--pace=0.05")
PYTORCHJOBS, TFJOBS = "pytorchjobs.kubeflow.org", "tfjobs.kubeflow.org"
VOLUME = (
    "gpt-data"  # the volume of the guide's PyTorchJob has no namespace: an interrupted run may have left it
)
_RANDOM = re.compile(r"kube-api-access-\w+")  # the name of a volume that the API server adds

SUPERVISED = ("statefulset", "job", "pytorchjob", "bare-pods")
PLAIN = "job-plain"

Trainings = dict[str, TrainingJob]


@pytest.fixture(scope="session")
def trainings(installed: ClusterUnderTest, namespaces: Namespaces) -> Iterator[Trainings]:
    """Start all examples together, each in a separate namespace, and the Job also under torchrun.

    Examples for an operator that the cluster lacks are omitted.
    """
    names = [name for name in (*SUPERVISED, PLAIN) if name != "pytorchjob" or has(installed, PYTORCHJOBS)]
    found = {}
    for name in names:
        level = "baseline" if name == "pytorchjob" else "restricted"  # its operator adds a container
        found[name] = TrainingJob(installed, namespaces.make(level), example(f"{name}.yaml", *OPTIONS))
        found[name].start()
    found["statefulset"].trains()
    found["statefulset"].follow("gpt-0")
    yield found
    for job in found.values():
        job.unfollow()


@pytest.fixture(scope="session")
def killed_job(trainings: Trainings) -> TrainingJob:
    """Return the Job after its rank 1 was killed."""
    return killed(job_of(trainings, "job"), rank=1)


@pytest.fixture(scope="session")
def killed_pytorchjob(trainings: Trainings) -> TrainingJob:
    """Return the PyTorchJob after its rank 0 was killed."""
    return killed(job_of(trainings, "pytorchjob"), rank=0)


@pytest.fixture(scope="session")
def guide(installed: ClusterUnderTest, namespaces: Namespaces) -> Iterator[TrainingJob]:
    """Yield the PyTorchJob in the shape of the guides."""
    objects = example("pytorchjob-guide.yaml", "--data=/data", *OPTIONS)
    installed.kubectl("delete", "persistentvolume", VOLUME, "--ignore-not-found")
    yield started(installed, namespaces, objects, PYTORCHJOBS)
    installed.kubectl("delete", "persistentvolume", VOLUME, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def killed_tfjob(installed: ClusterUnderTest, namespaces: Namespaces) -> TrainingJob:
    """Return the TFJob after one of its ranks was killed."""
    return killed(started(installed, namespaces, example("tfjob.yaml", *OPTIONS), TFJOBS), rank=1)


@pytest.fixture(scope="session")
def killed_deployment(installed: ClusterUnderTest, namespaces: Namespaces) -> Iterator[TrainingJob]:
    """Yield the Deployment after its rank 1 was killed."""
    job = TrainingJob(installed, namespaces.make(), example("deployment.yaml", *OPTIONS))
    job.start()
    killed(job, rank=1)
    job.follow(job.rank_pod(0))  # a restarted container hides the log of its predecessor
    yield job
    job.unfollow()


def started(
    cluster: ClusterUnderTest, namespaces: Namespaces, objects: list[Json], resource: str
) -> TrainingJob:
    if not has(cluster, resource):
        refuse(f"this cluster has no {resource}: install Kubeflow's training operator 1.x")
    job = TrainingJob(cluster, namespaces.make("baseline"), objects)
    job.start()
    return job


def killed(job: TrainingJob, rank: int) -> TrainingJob:
    job.reaches(KILL_AT)
    job.signal_rank(rank, signal.SIGKILL)
    return job


def has(cluster: ClusterUnderTest, resource: str) -> bool:
    return cluster.attempt("get", "crd", resource).returncode == 0


def job_of(trainings: Trainings, name: str) -> TrainingJob:
    if name not in trainings:
        refuse(f"this cluster has no {PYTORCHJOBS}: install Kubeflow's training operator 1.x")
    return trainings[name]


def ended_well(job: TrainingJob, generation: int) -> Json:
    """Wait until the supervisor has recorded the end of the job; return the status of its Supervision."""

    def look() -> Json | None:
        status = job.status()
        return status if status.get("phase") == "ended" and "exitCode" in status else None

    status: Json = job.until(look, "the supervisor says that the job has ended", SUMMARY_S)
    assert (status["exitCode"], status["generation"]) == (0, generation)
    return status


def owner_says(job: TrainingJob, condition: str) -> Json:
    """Wait for a condition of the owner of the pods, and return the owner's status."""

    def look() -> Json | None:
        status = job.owner()
        known = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return status if known.get(condition) == "True" else None

    status: Json = job.until(look, f"the owner is {condition}", TRAINED_S)
    return status


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*-plain.yaml")), ids=lambda path: path.stem)
def test_a_pod_that_does_not_opt_in_is_admitted_unchanged(
    path: Any, installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    """The same pod is created in a namespace that the webhook never sees, and in one that it sees."""
    seen, unseen = namespaces.make(), namespaces.make(injection="disabled")
    for pod in pods_in(example(path.name)):
        pod.update(apiVersion="v1", kind="Pod")
        pod.setdefault("metadata", {}).setdefault("name", "gpt")
        one, other = (admitted(installed, namespace, pod) for namespace in (seen, unseen))
        assert one == other
        assert "holdfast.dev" not in one
    for namespace in (seen, unseen):
        namespaces.delete(namespace)


def admitted(cluster: ClusterUnderTest, namespace: str, pod: Json) -> str:
    """Return the pod that would be created, as text, without fields that differ between identical pods."""
    dry = ("create", "--dry-run=server", "-o", "json", "-n", namespace, "-f", "-")
    found = json.loads(cluster.kubectl(*dry, text=json.dumps(pod)))
    for name in ("uid", "creationTimestamp", "namespace"):
        found["metadata"].pop(name, None)
    return _RANDOM.sub("kube-api-access", json.dumps(found, sort_keys=True))


@pytest.mark.parametrize("name", ["job", "pytorchjob"])
@pytest.mark.parametrize("own", [None, {"runAsNonRoot": True}], ids=["no context", "not root"])
def test_an_image_names_the_user_of_the_training_and_the_sidecar_is_another(
    name: str, own: Json | None, installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    """Only `USER` in the image names the user. The pod trains, and recovers from snapshots of that user."""
    if name == "pytorchjob" and not has(installed, PYTORCHJOBS):
        refuse(f"this cluster has no {PYTORCHJOBS}: install Kubeflow's training operator 1.x")
    objects = example(f"{name}.yaml", "--steps=1000000", "--pace=0.05")
    for template in pods_in(objects):
        template["spec"].pop("securityContext")
        trainer = template["spec"]["containers"][0]
        trainer.pop("securityContext")
        trainer.update({"securityContext": own} if own else {})  # the operator's own container is root
    job = TrainingJob(installed, namespaces.make("baseline"), objects)
    job.start()
    job.reaches(1)
    pod = job.rank_pod(0)
    users = [
        installed.kubectl("exec", "-n", job.namespace, pod, "-c", container, "--", "id", "-u").strip()
        for container in (job.container, pod_layout.SIDECAR)
    ]
    assert users == ["1000", "65532" if own else "0"]
    before = job.observe()
    job.signal_rank(0, signal.SIGKILL)
    job.recovered(before)
    installed.kubectl("delete", "pod", "-n", job.namespace, job.rank_pod(1), "--wait=false")
    job.until(
        lambda: job.observe().incidents > before.incidents + 1 or None, "a second incident", RECOVERED_S
    )
    job.trains(RECOVERED_S)
    assert job.step() > 1, "the new pod has fetched the state from the other one"
    namespaces.delete(job.namespace)


def test_the_pods_of_the_twin_equal_its_template(trainings: Trainings) -> None:
    """The Job controller created them while the webhook injected the pods of the other jobs."""
    job = trainings[PLAIN]
    pods = job.until(lambda: job.pods() or None, "the Job has made its pods", SUMMARY_S)
    for pod in pods:
        assert programs(pod) == programs(job.template)
        volumes = [each["name"] for each in pod["spec"]["volumes"] if not _RANDOM.match(each["name"])]
        assert volumes == [each["name"] for each in job.template["spec"]["volumes"]]
        keys = (*pod["metadata"]["labels"], *pod["metadata"].get("annotations", {}))
        assert not [key for key in keys if key.startswith("holdfast.dev/")]


def programs(pod: Json) -> list[tuple[Any, ...]]:
    """Return the containers of a pod with their commands."""
    containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    return [tuple(each.get(key) for key in ("name", "image", "command", "args")) for each in containers]


def test_a_killed_rank_of_a_job_costs_a_step_at_most(killed_job: TrainingJob) -> None:
    one_crash(killed_job, rank=1)


def test_a_killed_rank_of_a_pytorchjob_costs_a_step_at_most(killed_pytorchjob: TrainingJob) -> None:
    one_crash(killed_pytorchjob, rank=0)


def one_crash(job: TrainingJob, rank: int) -> None:
    def look() -> Json | None:
        recent: list[Json] = job.status().get("recent") or []
        return recent[0] if recent and not recent[0]["open"] else None

    incident: Json = job.until(look, "the job has recovered from an incident", RECOVERED_S)
    assert (incident["kind"], incident["rank"], incident["remedy"]) == ("crash", rank, "restart")
    assert incident["lost_steps"] in (0, 1), incident


def test_a_statefulset_trains_to_its_end(trainings: Trainings) -> None:
    """Its owner would start it again forever, so the supervisor orders each new container to end."""
    job = trainings["statefulset"]
    assert job.digest()
    assert ended_well(job, generation=1)["incidents"] == 0


def test_a_job_whose_rank_was_killed_is_complete(killed_job: TrainingJob) -> None:
    found = owner_says(killed_job, "Complete")
    assert found["succeeded"] == 2
    assert not found.get("failed")
    assert restarts(killed_job.pods()) == {}
    assert ended_well(killed_job, generation=2)["incidents"] == 1


def test_a_pytorchjob_whose_rank_was_killed_has_succeeded(killed_pytorchjob: TrainingJob) -> None:
    found = owner_says(killed_pytorchjob, "Succeeded")
    assert not [each for each in found["replicaStatuses"].values() if each.get("failed")]
    assert restarts(killed_pytorchjob.pods()) == {}
    assert ended_well(killed_pytorchjob, generation=2)["incidents"] == 1


def test_a_pytorchjob_in_the_shape_of_the_guides_trains_to_its_end(
    guide: TrainingJob, trainings: Trainings
) -> None:
    """It trains on the text of the other examples, which its init container has stored in a claim."""
    assert guide.digest() == trainings["bare-pods"].digest()
    found = owner_says(guide, "Succeeded")
    assert not [each for each in found["replicaStatuses"].values() if each.get("failed")]
    assert restarts(guide.pods()) == {}
    assert ended_well(guide, generation=1)["incidents"] == 0


def test_a_deployment_whose_rank_was_killed_trains_to_its_end(
    killed_deployment: TrainingJob, trainings: Trainings
) -> None:
    """Its owner would start it again forever, so the supervisor orders each new container to end."""
    one_crash(killed_deployment, rank=1)
    assert killed_deployment.digest() == trainings["bare-pods"].digest()
    assert ended_well(killed_deployment, generation=2)["incidents"] == 1


def test_a_tfjob_whose_rank_was_killed_starts_over_and_succeeds(killed_tfjob: TrainingJob) -> None:
    """Its script does not use torch and keeps no state. Its pods are not replaced."""
    pods = killed_tfjob.observe().pods
    assert killed_tfjob.digest()
    owner_says(killed_tfjob, "Succeeded")
    assert killed_tfjob.observe().pods == pods
    assert restarts(killed_tfjob.pods()) == {}
    found = ended_well(killed_tfjob, generation=2)
    (incident,) = found["recent"]
    assert (found["incidents"], incident["remedy"]) == (1, "restart")
    assert incident["kind"] in ("crash", "exception")  # the other worker fails too, and may be seen first


def test_bare_pods_train_to_their_end(trainings: Trainings) -> None:
    job = trainings["bare-pods"]

    def look() -> bool | None:
        phases = {pod["status"]["phase"] for pod in job.pods()}
        return True if phases == {"Succeeded"} else None

    job.until(look, "both pods have succeeded", TRAINED_S)
    assert restarts(job.pods()) == {}
    ended_well(job, generation=1)


def test_the_log_of_the_container_contains_the_output_of_the_script(trainings: Trainings) -> None:
    job = trainings["bare-pods"]
    job.digest()
    assert job.steps("gpt-0") == list(range(STEPS))
    assert job.steps("gpt-1") == []  # only rank 0 prints


@pytest.mark.parametrize("name", [*SUPERVISED, PLAIN])
def test_every_job_ends_with_the_same_weights(name: str, trainings: Trainings) -> None:
    """This is true whether or not a rank was killed, and under torchrun as well."""
    assert job_of(trainings, name).digest() == trainings["bare-pods"].digest()
