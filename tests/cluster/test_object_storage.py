"""A job keeps its checkpoints in an S3 server on this machine, and resumes from them without its pods."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.bucket import address, saved_steps, secret
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import RECOVERED_S, SUMMARY_S, TrainingJob, example
from tests.s3server.server import SECRET_KEY, ObjectServer, Refusal, serving

SECRET, PREFIX = "gpt-s3", "runs/gpt"
SAVED_S = 60.0  # until a checkpoint is published: it is due every 2 s


@pytest.fixture(scope="module")
def server(cluster: ClusterUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serving(tmp_path_factory.mktemp("s3") / "objects", address(cluster)) as made:
        yield made


@pytest.fixture(scope="module")
def stored_job(
    installed: ClusterUnderTest, namespaces: Namespaces, server: ObjectServer
) -> Iterator[TrainingJob]:
    annotations = {
        "holdfast.dev/checkpoints": f"s3://checkpoints/{PREFIX}",
        "holdfast.dev/checkpoints-secret": SECRET,
        "holdfast.dev/checkpoint-every": "2s",
        "holdfast.dev/keep-checkpoints": "2",
    }
    objects = example("statefulset.yaml", "--steps=1000000", "--pace=0.05", annotations=annotations)
    job = TrainingJob(installed, namespaces.make(), [secret(server, SECRET), *objects])
    job.start()
    job.trains()
    yield job
    namespaces.delete(job.namespace)


def test_checkpoints_are_published_and_old_ones_deleted(
    stored_job: TrainingJob, server: ObjectServer
) -> None:
    first: list[int] = stored_job.until(lambda: saved_steps(server) or None, "a checkpoint", SAVED_S)

    def look() -> bool | None:
        found = saved_steps(server)
        return True if len(found) == 2 and found[0] > first[0] else None

    stored_job.until(look, "a newer checkpoint, and the first one is deleted", SAVED_S)
    folders = {key.split("/")[2] for key in server.filled() if "/step-" in key}
    assert len(folders) <= 3, "the checkpoints kept and the one being written"


def test_the_job_resumes_from_the_bucket_when_all_pods_were_deleted(
    stored_job: TrainingJob, server: ObjectServer
) -> None:
    job = stored_job
    before = {pod["metadata"]["uid"] for pod in job.pods()}
    job.cluster.kubectl("delete", "pods", "--all", "-n", job.namespace, "--wait=false")

    def others() -> bool | None:
        found = {pod["metadata"]["uid"] for pod in job.pods()}
        return True if len(found) == 2 and not found & before else None

    job.until(others, "the owner has made two other pods", RECOVERED_S)
    resumed_from = max(saved_steps(server))

    def first_step() -> int | None:
        found = [step for pod in job.pods() for step in job.steps(pod["metadata"]["name"])[:1]]
        return min(found, default=None)

    first: int = job.until(first_step, "the next run prints a step", RECOVERED_S)
    assert first in (resumed_from, resumed_from + 1)
    assert job.trains() > first
    reads = [each.key for each in server.requests if each.method == "GET" and "replicated" in each.key]
    assert [key for key in reads if f"step-{resumed_from:08d}/" in key], (
        "the state came from memory, not from the bucket"
    )


def test_a_failing_bucket_disturbs_no_training_and_is_reported(
    stored_job: TrainingJob, server: ObjectServer
) -> None:
    job, before = stored_job, stored_job.observe()
    server.interfere = lambda _: Refusal(403, "AccessDenied")
    try:

        def told() -> bool | None:
            text = json.dumps(job.status()) + json.dumps(job.view())
            return True if "the credentials do not permit the request (AccessDenied)" in text else None

        job.until(told, "the status has the reason", SAVED_S)
        job.trains()
    finally:
        server.interfere = lambda _: None
    newest = max(saved_steps(server))
    job.until(lambda: max(saved_steps(server)) > newest or None, "another checkpoint", SAVED_S)
    after = job.observe()
    assert (after.generation, after.incidents) == (before.generation, before.incidents)


def test_only_the_secret_contains_the_credentials(stored_job: TrainingJob) -> None:
    job = stored_job

    def look() -> bool | None:
        return True if job.status() else None

    job.until(look, "there is a Supervision", SUMMARY_S)
    seen = [json.dumps(job.status()), json.dumps(job.pods())]
    seen += [job.cluster.kubectl("get", "events", "-n", job.namespace, "-o", "json")]
    for pod in job.pods():
        for container in ("holdfast-sidecar", job.container):
            seen.append(job.cluster.log(job.namespace, pod["metadata"]["name"], container))
    assert not [text for text in seen if SECRET_KEY in text]
    training = [c for pod in job.pods() for c in pod["spec"]["containers"]]
    assert all(SECRET not in json.dumps(each) for each in training)
