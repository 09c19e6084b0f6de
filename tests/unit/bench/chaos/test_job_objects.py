from __future__ import annotations

import json

import pytest

from bench.chaos.job_objects import objects
from bench.chaos.job_table import CHAOS_JOBS, UNDISTURBED, ChaosJob
from supervisor.admission.settings import ANNOTATIONS
from tests.cluster.apparatus.training_job import pods_in

ALL = (*CHAOS_JOBS, UNDISTURBED)


@pytest.mark.parametrize("job", ALL, ids=lambda job: job.name)
def test_the_members_of_a_job_are_never_on_one_node(job: ChaosJob) -> None:
    pods = list(pods_in(objects(job, 100, 0.1)))
    assert pods
    for pod in pods:
        [term] = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("job", ALL, ids=lambda job: job.name)
def test_every_annotation_is_one_that_holdfast_accepts(job: ChaosJob) -> None:
    for pod in pods_in(objects(job, 100, 0.1)):
        names = {name for name in pod["metadata"]["annotations"] if name.startswith("holdfast.dev/")}
        assert names - {"holdfast.dev/inject"} <= set(ANNOTATIONS)


def test_all_jobs_do_the_same_training() -> None:
    words = {
        tuple(word for word in pod["spec"]["containers"][0]["args"] if not word.startswith("--pace"))
        for job in ALL
        for pod in pods_in(objects(job, 100, 0.1 if job in CHAOS_JOBS else 0.0))
    }
    assert len(words) == 1
    assert "--digest=-" in json.dumps(list(words))
