"""A standby trains like the pod that it copies, and is not mistaken for it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from supervisor.admission import pod_layout
from supervisor.cluster.adoption import pod_facts, workload_kinds
from supervisor.cluster.standbys.pod_copy import (
    MAX_NAME,
    NoCopy,
    gangs_left,
    on_nodes,
    standby_name,
    standby_number,
    standby_pod,
)
from supervisor.cluster.supervision import contents

MODEL: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "gpt-1",
        "namespace": "team",
        "uid": "u-1",
        "resourceVersion": "9",
        "labels": {
            "app": "mine",
            "training.kubeflow.org/job-name": "gpt",
            "training.kubeflow.org/replica-index": "0",
            pod_layout.MEMBER_LABEL: pod_layout.IS_MEMBER,
        },
        "annotations": {
            pod_layout.INJECT: "true",
            pod_layout.INJECTED: json.dumps({"version": "1", "container": "main", "nproc": 2}),
            "batch.kubernetes.io/job-completion-index": "1",
        },
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "gpt", "uid": "j"}],
        "finalizers": ["batch.kubernetes.io/job-tracking"],
    },
    "spec": {
        "nodeName": "n1",
        "hostname": "gpt-1",
        "priority": 5,
        "priorityClassName": "high",
        "preemptionPolicy": "PreemptLowerPriority",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "containers": [
            {
                "name": "main",
                "image": "t",
                "volumeMounts": [{"name": "kube-api-access-x1", "mountPath": "/v"}],
            }
        ],
        "volumes": [{"name": "kube-api-access-x1", "projected": {}}, {"name": "data", "emptyDir": {}}],
    },
    "status": {"phase": "Running"},
}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def made(model: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(model)
    found = standby_pod(model, "gpt", "s-uid", 3)
    assert model == before, "the model was changed"
    assert isinstance(found, dict), found
    return found


def test_a_standby_has_what_trains_and_not_what_identifies() -> None:
    found = made(MODEL)
    metadata, spec = found["metadata"], found["spec"]
    assert metadata["name"] == "gpt-standby-3"
    assert metadata.keys() == {"name", "namespace", "labels", "annotations", "ownerReferences"}
    assert metadata["labels"] == {
        "app": "mine",
        pod_layout.MEMBER_LABEL: pod_layout.IS_MEMBER,
        pod_layout.STANDBY_OF: "gpt",
    }
    assert metadata["annotations"].keys() == {pod_layout.INJECT, pod_layout.INJECTED}
    assert not {"nodeName", "hostname", "priority", "preemptionPolicy"} & spec.keys()
    assert spec["priorityClassName"] == "high", "it keeps the priority when it takes over ranks"
    assert spec["tolerations"] == MODEL["spec"]["tolerations"]
    assert [each["name"] for each in spec["volumes"]] == ["data"]
    assert spec["containers"][0]["volumeMounts"] == []
    assert "status" not in found


def test_the_supervision_owns_a_standby_even_after_the_mirror_has_pruned_the_pod() -> None:
    found = made(MODEL)
    assert contents.supervision_of(found) == "s-uid"
    assert contents.supervision_of(pod_facts.kept({**found, "status": {}})) == "s-uid"
    assert contents.supervision_of(MODEL) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {}},
        {"ownerReferences": []},
        {"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "controller": True, "uid": "j"}]},
        {"ownerReferences": [{"apiVersion": "holdfast.dev/v1", "kind": "Supervision", "uid": "j"}]},
        {"ownerReferences": "broken"},
    ],
)
def test_a_pod_without_the_label_and_the_owner_is_no_standby(change: dict[str, Any]) -> None:
    pod = made(MODEL)
    pod["metadata"].update(change)
    assert contents.supervision_of(pod) == ""


def test_no_label_by_which_a_controller_finds_its_pods_is_copied() -> None:
    model = copy.deepcopy(MODEL)
    kinds = workload_kinds.shipped()
    keys = {source.key for row in kinds.owners for source in row.replica_type if source.place == "label"}
    keys |= {
        source.key
        for row in kinds.owners
        for group in row.index
        for source in group
        if source.place == "label"
    }
    assert len(keys) > 5
    model["metadata"]["labels"].update(dict.fromkeys(keys, "0"))
    assert not keys & made(model)["metadata"]["labels"].keys()


def _affine(terms: list[dict[str, Any]]) -> dict[str, Any]:
    model = copy.deepcopy(MODEL)
    model["spec"]["affinity"] = {
        "podAntiAffinity": {"x": 1},
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}},
    }
    return model


TERMS: list[dict[str, Any]] = [
    {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
    {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}]},
]


def test_a_standby_is_limited_to_nodes_in_each_alternative_of_the_user() -> None:
    affinity = on_nodes(made(_affine(TERMS)), ["n4", "n3"])["spec"]["affinity"]
    assert affinity["podAntiAffinity"] == {"x": 1}
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert len(terms) == 4
    for number, term in enumerate(terms):
        node = {"key": "metadata.name", "operator": "In", "values": [("n3", "n4")[number % 2]]}
        assert term["matchFields"][-1] == node, "the API server accepts one name for each requirement"
    assert terms[0]["matchExpressions"] == TERMS[0]["matchExpressions"]
    assert terms[2]["matchFields"][0] == TERMS[1]["matchFields"][0]


def test_a_copy_of_a_standby_is_not_limited_to_the_nodes_of_its_model() -> None:
    standby = on_nodes(made(_affine(TERMS[:1])), ["n3", "n4"])
    assert made(standby)["spec"]["affinity"] == _affine(TERMS[:1])["spec"]["affinity"]
    plain = on_nodes(made(MODEL), ["n3"])
    assert "nodeAffinity" in plain["spec"]["affinity"]
    assert made(plain)["spec"]["affinity"] == {}


def test_a_standby_belongs_to_no_gang_and_this_is_told() -> None:
    model = copy.deepcopy(MODEL)
    labels = ["scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io"]
    model["metadata"]["labels"] |= dict.fromkeys(labels, "gpt")
    model["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = "gpt"
    model["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] = "q"
    model["spec"]["schedulingGroup"] = {"podGroupName": "gpt"}
    model["spec"]["schedulingGates"] = [{"name": "mine"}]
    found = made(model)
    assert gangs_left(model, found) == [*labels, "scheduling.k8s.io/group-name", "schedulingGroup"]
    assert not {*found["metadata"]["labels"], *found["metadata"]["annotations"]} & {
        *labels,
        "scheduling.k8s.io/group-name",
    }
    assert found["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] == "q"
    assert not {"schedulingGroup", "schedulingGates"} & found["spec"].keys()
    assert gangs_left(MODEL, made(MODEL)) == []


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("labels", "kueue.x-k8s.io/queue-name"),
        ("labels", "kueue.x-k8s.io/podset"),
        ("annotations", "kueue.x-k8s.io/workload"),
    ],
)
def test_a_pod_that_kueue_admits_is_not_copied_beyond_the_quota(part: str, name: str) -> None:
    model = copy.deepcopy(MODEL)
    model["metadata"][part][name] = "team"
    found = standby_pod(model, "gpt", "u", 1)
    assert isinstance(found, NoCopy)
    assert name in found.why
    assert "quota" in found.why


def test_a_pod_whose_owner_kueue_admits_is_not_copied_although_the_pod_does_not_show_it() -> None:
    found = standby_pod(MODEL, "gpt", "u", 1, "kueue.x-k8s.io/queue-name of Job team/gpt")
    assert isinstance(found, NoCopy)
    assert "(kueue.x-k8s.io/queue-name of Job team/gpt)" in found.why


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data-gpt-1"}}]},
            "claim data-gpt-1",
        ),
        ({"resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]}, "resourceClaimTemplateName"),
    ],
)
def test_a_pod_with_something_that_only_one_pod_can_have_is_not_copied(
    part: dict[str, Any], words: str
) -> None:
    found = standby_pod({**MODEL, "spec": {**MODEL["spec"], **part}}, "gpt", "u", 1)
    assert isinstance(found, NoCopy)
    assert words in found.why


def test_a_claim_that_all_pods_share_is_kept() -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    found = made({**MODEL, "spec": {**MODEL["spec"], "volumes": [volume]}})
    assert found["spec"]["volumes"] == [volume]


@pytest.mark.parametrize("supervision", ["gpt", "a" * 60, f"{'a' * 52}.b", "x" * 253])
def test_a_name_is_a_valid_host_name_and_contains_the_number(supervision: str) -> None:
    name = standby_name(supervision, "u-1", 12)
    assert len(name) <= MAX_NAME
    assert "..-" not in name
    assert ".-" not in name
    assert standby_number(name) == 12
    assert standby_number("gpt-worker-0") == 0


def test_long_names_that_differ_at_their_end_do_not_become_the_same() -> None:
    names = {standby_name("x" * 60 + end, f"uid-{end}", 1) for end in "ab"}
    assert len(names) == 2
    assert standby_name("x" * 50, "u", 1) == "x" * 50 + "-standby-1", "a name that is short enough is kept"
