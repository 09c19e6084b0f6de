from __future__ import annotations

import json

import pytest

from supervisor.admission.pod_layout import INJECT
from supervisor.cluster.adoption import owner_size
from supervisor.cluster.adoption.job_membership import NotAdopted, adopt, top_owner
from supervisor.cluster.adoption.pod_facts import characters
from tests.unit.supervisor.cluster.adoption.workloads import (
    JOBSET,
    LWS,
    NOT_OPTED_IN,
    OPTED_IN,
    adopted,
    kubeflow,
    kubeflow_pod,
    made,
    pod,
    refused,
)


def test_a_job_whose_pods_do_not_all_run_at_once_is_refused() -> None:
    job = made("batch/v1", "Job", "sweep", {"parallelism": 2, "completions": 8})
    assert "spec.completions of Job team/sweep is 8 and spec.parallelism is 2" in refused(pod("a", job), job)


def test_several_replica_types_without_an_opt_in_are_refused_unless_they_are_known_to_train() -> None:
    jobs = [{"name": name, "template": {"spec": {"parallelism": 2}}} for name in ("trainer", "reader")]
    jobset = made("jobset.x-k8s.io/v1alpha2", "JobSet", "llama", {"replicatedJobs": jobs})
    member = pod("a", jobset, {f"{JOBSET}replicatedjob-name": "trainer"})
    assert "has several replica types ('trainer, reader'), but none opts in" in refused(member, jobset)
    member["metadata"]["annotations"]["holdfast.dev/members"] = "2"
    assert adopted(member, jobset).members == 2
    known = kubeflow("PyTorchJob", "pytorchReplicaSpecs", Master=1, Worker=1)
    for part in known["spec"]["pytorchReplicaSpecs"].values():
        part["template"] = NOT_OPTED_IN
    assert adopted(kubeflow_pod(known, "worker", 0), known).members == 2


def test_a_pod_without_a_replica_type_is_refused_if_there_are_several() -> None:
    owner = kubeflow("TFJob", "tfReplicaSpecs", PS=1, Worker=2)
    member = kubeflow_pod(owner, "worker", 0)
    member["metadata"]["labels"] = {}
    assert "does not state which replica type of TFJob team/llama it has" in refused(member, owner)


@pytest.mark.parametrize("replicas", [0, 20_000])
def test_an_owner_of_no_pods_or_far_too_many_is_refused(replicas: int) -> None:
    owner = made("apps/v1", "StatefulSet", "llama", {"replicas": replicas})
    assert "expected" in refused(pod("llama-0", owner), owner)


def test_the_tables_default_replaces_fields_that_the_owner_omits() -> None:
    parts = {"Worker": {"template": OPTED_IN}}
    owner = made("kubeflow.org/v1", "PyTorchJob", "llama", {"pytorchReplicaSpecs": parts})
    assert adopted(kubeflow_pod(owner, "worker", 0), owner).members == 1


def test_a_leaderworkerset_whose_leader_does_not_opt_in_has_no_known_size() -> None:
    templates = {"size": 3, "leaderTemplate": NOT_OPTED_IN, "workerTemplate": OPTED_IN}
    lws = made("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "llama", {"leaderWorkerTemplate": templates})
    member = pod("llama-0-1", lws, {f"{LWS}group-index": "0", f"{LWS}worker-index": "1"})
    assert "only some of the pod templates" in refused(member, lws)
    member["metadata"]["annotations"]["holdfast.dev/members"] = "2"
    assert adopted(member, lws).members == 2


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (None, "pytorchReplicaSpecs of PyTorchJob team/llama has 0 replica types"),
        ("x", "expected an object"),
        ({"pytorchReplicaSpecs": []}, "expected an object"),
        ({"pytorchReplicaSpecs": {"Worker": 2}}, "is 2; expected an object"),
        ({"pytorchReplicaSpecs": {"Worker": {"replicas": "2"}}}, "is '2'; expected a whole number"),
        ({"pytorchReplicaSpecs": {"Worker": {"replicas": -1}}}, "is -1; expected a whole number"),
        ({"pytorchReplicaSpecs": {"Worker": {"replicas": 1, "template": 1}}}, "expected an object"),
    ],
)
def test_an_owner_with_a_wrong_type_is_refused_with_its_place(spec: object, told: str) -> None:
    owner = kubeflow("PyTorchJob", "pytorchReplicaSpecs", Worker=1)
    owner["spec"] = spec
    assert told in refused(kubeflow_pod(owner, "worker", 0), owner)


def test_of_an_owner_with_large_templates_little_is_kept() -> None:
    env = [{"name": "A", "value": "x" * 1_200_000}]
    annotations = {INJECT: "true", "note": "x" * 90_000}
    spec = {"containers": [{"env": env}], "volumes": [{"name": "v"}] * 9_000, "restartPolicy": "Never"}
    template = {"metadata": {"annotations": annotations}, "spec": spec}
    job = made("batch/v1", "Job", "llama", {"parallelism": 2, "template": template})
    job |= {"status": {"message": "x" * 9_000}}
    stored = owner_size.kept(job)
    assert len(json.dumps(stored)) < 600
    assert adopted(pod("a", job), job).members == 2
    assert stored["spec"]["template"]["metadata"]["annotations"] == {INJECT: "true"}


@pytest.mark.parametrize("value", [{f"k-{n}": "x" * 200 for n in range(900)}, [["x" * 200] * 900] * 3])
def test_an_owner_that_is_too_large_without_its_templates_is_refused(value: object) -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2, "more": value})
    stored = dict(owner_size.kept(job))
    assert len(json.dumps(stored)) < 300
    member = pod("a", job)
    found = adopt(member, top_owner(member, lambda _: stored), ())
    assert isinstance(found, NotAdopted)
    assert f"has {characters(owner_size._without_bulk(job, 32))} characters" in found.why


def test_an_owner_of_any_depth_is_pruned() -> None:
    deep: object = "x"
    for _ in range(900):
        deep = [{"a": deep}]
    assert owner_size.kept(made("batch/v1", "Job", "llama", {"parallelism": 2, "more": deep}))["spec"]
