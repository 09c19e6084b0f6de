"""The demo reports which containers were restarted, and why a pod does not start."""

from __future__ import annotations

import pytest

from supervisor.cli.on_cluster.demo import pods
from supervisor.cli.on_cluster.demo.faults import KILL, POD, SIDECAR, SUPERVISOR, ClusterFault, as_expected
from supervisor.cli.on_cluster.demo.pods import PodChanges
from tests.unit.supervisor.cli.on_cluster.demo.samples import pod, waiting

CALM = PodChanges()
REPLACED = PodChanges(("gpt-1-a",), ("gpt-1-b",))
SIDECAR_BACK = PodChanges(restarted=(("gpt-0-a", "holdfast-sidecar"),))
TRAINER_BACK = PodChanges(restarted=(("gpt-0-a", "trainer"),))


def test_pods_that_stay_have_not_changed() -> None:
    before = pods.seen([pod("gpt-0-a", trainer=1)])
    assert pods.changes(before, before) == CALM
    assert str(CALM) == "no pod and no container was restarted"


def test_a_pod_with_another_name_is_a_replacement_and_one_that_is_being_deleted_is_gone() -> None:
    old, kept = pod("gpt-1-a", trainer=0), pod("gpt-0-a", trainer=0)
    ending = {**old, "metadata": {**old["metadata"], "deletionTimestamp": "2026-11-25T18:00:00Z"}}
    after = pods.seen([kept, ending, pod("gpt-1-b", trainer=0)])
    found = pods.changes(pods.seen([kept, old]), after)
    assert found == REPLACED
    assert str(found) == "pod gpt-1-a was replaced by gpt-1-b"


def test_a_pod_of_the_same_name_with_another_uid_is_a_replacement_too() -> None:
    found = pods.changes(
        pods.seen([pod("gpt-1", "u1", trainer=2)]), pods.seen([pod("gpt-1", "u2", trainer=3)])
    )
    assert found == PodChanges(("gpt-1",), ("gpt-1",)), "the containers are new, not restarted"


def test_a_container_that_was_restarted_is_named() -> None:
    before = pods.seen([pod("gpt-0-a", trainer=0, holdfast_sidecar=1)])
    found = pods.changes(before, pods.seen([pod("gpt-0-a", trainer=0, holdfast_sidecar=2)]))
    assert found == SIDECAR_BACK
    assert str(found) == "the kubelet restarted holdfast-sidecar of gpt-0-a"


@pytest.mark.parametrize(
    ("fault", "expected"), [(KILL, CALM), (SUPERVISOR, CALM), (SIDECAR, SIDECAR_BACK), (POD, REPLACED)]
)
def test_each_fault_may_restart_only_what_it_ends(fault: ClusterFault, expected: PodChanges) -> None:
    every = (
        CALM,
        REPLACED,
        SIDECAR_BACK,
        TRAINER_BACK,
        PodChanges(REPLACED.gone, REPLACED.new, SIDECAR_BACK.restarted),
    )
    assert [each for each in every if as_expected(fault, each)] == [expected]


@pytest.mark.parametrize(
    "reason", ["ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"]
)
def test_an_image_that_a_node_lacks_is_named_with_what_to_do(reason: str) -> None:
    said = pods.missing_image([pod("gpt-0-a", trainer=0), waiting("gpt-1-a", reason, "holdfast-trainer:dev")])
    assert said.startswith("node n1 does not have the image holdfast-trainer:dev")
    assert reason in said
    assert "`make images`" in said
    assert "\n" not in said


def test_a_container_that_is_being_made_lacks_no_image() -> None:
    assert pods.missing_image([waiting("gpt-0-a", "ContainerCreating"), pod("gpt-1-a", trainer=0)]) == ""


def test_a_pod_that_does_not_run_is_named_with_the_reason() -> None:
    unplaced = pod("gpt-0-a", phase="Pending")
    why = "0/2 nodes are available: 2 Insufficient memory."
    unplaced["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": why}]
    assert pods.waiting_for([unplaced]) == f"gpt-0-a is Pending ({why})"
    assert (
        pods.waiting_for([waiting("b", "PodInitializing")])
        == "b is Pending (holdfast-setup: PodInitializing)"
    )
    assert pods.waiting_for([pod("c"), pod("d", phase="Succeeded")]) == ""


def test_a_pod_without_the_sidecar_was_not_injected() -> None:
    plain = pod("gpt-0-a")
    assert pods.not_injected([plain]) == "pod gpt-0-a was not injected: the webhook did not answer"
    plain["metadata"]["annotations"] = {"holdfast.dev/not-injected": "spec.os.name is windows"}
    assert pods.not_injected([plain]) == "pod gpt-0-a was not injected: spec.os.name is windows"
    plain["spec"]["initContainers"] = [{"name": "holdfast-sidecar"}]
    assert pods.not_injected([plain]) == ""


def test_init_containers_that_exited_with_0_do_not_count_as_stopped() -> None:
    found = pod("gpt-0-a", trainer=0, holdfast_sidecar=1)
    found["status"]["initContainerStatuses"] = [
        {"name": "holdfast-setup", "state": {"terminated": {"exitCode": 0}}}
    ]
    assert pods.all_run([found])
    found["status"]["containerStatuses"][1]["state"] = {"terminated": {"exitCode": 137}}
    assert not pods.all_run([found])


def test_a_replacement_is_timed_from_the_fault() -> None:
    fault_s = 1_764_093_571.3  # 2025-11-25T17:59:31.3Z
    new = pod("gpt-1-b", trainer=0)
    assert pods.replacement_times([new], "gpt-1-b", fault_s) == "", "the pod does not run yet"
    new["metadata"]["creationTimestamp"] = "2025-11-25T17:59:42Z"
    new["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2025-11-25T17:59:46Z"}}
    said = pods.replacement_times([pod("gpt-0-a"), new], "gpt-1-b", fault_s)
    assert said == "its owner created it after 11 s, and its container started after 15 s"
    assert pods.replacement_times([new], "gpt-1-c", fault_s) == ""
