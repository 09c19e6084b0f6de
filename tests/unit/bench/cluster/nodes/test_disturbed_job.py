"""The objects of the disturbed job, and what the fake GPUs read of a Node."""

from __future__ import annotations

from typing import Any

from bench.cluster.nodes import disturbed_job, fake_gpus
from bench.cluster.nodes.disturbed_job import LABEL, job_objects, reference_pod
from supervisor.admission import pod_layout


def templates(standbys: int) -> list[dict[str, Any]]:
    _, job = job_objects(standbys, 0.05)
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert [each["restartPolicy"] for each in specs.values()] == ["OnFailure", "OnFailure"]
    assert sum(each["replicas"] for each in specs.values()) == disturbed_job.RANKS
    return [each["template"] for each in specs.values()]


def test_members_are_on_different_nodes_and_have_a_standby_if_one_is_wanted() -> None:
    for template in templates(1):
        assert template["metadata"]["annotations"] == {
            pod_layout.INJECT: "true",
            f"{pod_layout.PREFIX}standby": "1",
        }
        [apart] = template["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert apart["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert LABEL in apart["labelSelector"]["matchLabels"]
        assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert [each["metadata"]["annotations"] for each in templates(0)] == [{pod_layout.INJECT: "true"}] * 2


def test_the_undisturbed_run_has_as_many_ranks_and_ends_after_the_given_steps() -> None:
    [container] = reference_pod(150)["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert f"--nproc-per-node={disturbed_job.RANKS}" in container["command"]
    assert given["HOLDFAST_STEPS"] == "150"
    assert pod_layout.INJECT not in str(reference_pod(150))


def test_a_node_is_fit_to_train_if_its_condition_says_so() -> None:
    node = {"status": {"conditions": [{"type": "TrainingNodeHealthy", "status": "False"}]}}
    assert fake_gpus.training_health(node) == "False"
    assert fake_gpus.training_health({}) == ""
