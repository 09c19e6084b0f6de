from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from supervisor.cluster.adoption.template_check import problem
from tests.unit.supervisor.cluster.adoption.workloads import pod

Json = dict[str, Any]


def template(in_command: int | None = None, **annotations: str) -> Json:
    """Return an injected pod template. `in_command` is the number of members in its command."""
    found = pod("a", nproc=2, members=in_command)
    noted = {f"holdfast.dev/{key}": text for key, text in annotations.items()}
    return {
        "metadata": {"annotations": {**found["metadata"]["annotations"], **noted}},
        "spec": found["spec"],
    }


def job(of: Json, **spec: Any) -> Json:
    metadata = {"name": "llama", "namespace": "team"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**spec, "template": of}}


def pytorch_job(of: Json, **replicas: Any) -> Json:
    parts = {name: {"replicas": count, "template": of} for name, count in replicas.items()}
    found = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "llama"}}
    return {**found, "spec": {"pytorchReplicaSpecs": parts}}


def job_set(of: Json, **sizes: int) -> Json:
    parts = [
        {"name": name, "template": {"spec": {"parallelism": size, "template": of}}}
        for name, size in sizes.items()
    ]
    found = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "llama"}}
    return {**found, "spec": {"replicatedJobs": parts}}


@pytest.mark.parametrize(
    ("owner", "path", "of"),
    [
        (job(template(), completions=2, parallelism=2), "spec.template", template()),
        (job(template(), completions=2, parallelism=2), " spec.template", template(in_command=2)),
        (job(template(), completions=4, parallelism=4), "spec.template", template(members="2")),
        (job(template(), completions=9, parallelism=2), "spec.template", template(members="2")),
        (pytorch_job(template(), Master=1, Worker=3), "spec.pytorchReplicaSpecs.Worker.template", template()),
        (job_set(template(), one=2, two=3), "spec.replicatedJobs[1].template.spec.template", template()),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {}}, "", template()),
        ({"apiVersion": "x.io/v9", "kind": "Job", "spec": []}, "spec.template", template()),
    ],
)
def test_a_job_that_would_train_has_no_problem(owner: Json, path: str, of: Json) -> None:
    assert problem(owner, path, of) == ""


@pytest.mark.parametrize(
    ("owner", "path", "of", "why"),
    [
        (
            job(template(), completions=2, parallelism=2),
            "spec.template",
            template(members="5"),
            "holdfast.dev/members is 5, but Job llama has 2 that train: the job would wait for more",
        ),
        (
            job(template(), completions=2, parallelism=2),
            "spec.template",
            template(group="other"),
            "its pods would train unsupervised: holdfast.dev/group is 'other', but the pod belongs to Job",
        ),
        (
            job(template(), completions=9, parallelism=2),
            "spec.template",
            template(),
            "so not all of its pods run at the same time: set holdfast.dev/members on the pods",
        ),
        (
            pytorch_job(template(), Master=1, Worker="many"),
            "spec.pytorchReplicaSpecs.Master.template",
            template(),
            "its pods would train unsupervised: replicas of PyTorchJob",
        ),
    ],
)
def test_a_problem_that_the_manifest_shows_is_reported(
    owner: Json, path: str, of: Mapping[str, Any], why: str
) -> None:
    assert why in problem(owner, path, of)
