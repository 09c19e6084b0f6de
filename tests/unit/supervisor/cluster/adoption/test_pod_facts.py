from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.admission import settings as pod_settings
from supervisor.cluster.adoption import pod_facts
from supervisor.cluster.adoption.pod_facts import CUT, KeptPods, kept, training_container
from supervisor.cluster.adoption.untrusted_json import UnfitObject
from supervisor.cluster.pods import read_pod
from supervisor.kubernetes.events import ObjectReference
from supervisor.kubernetes.watch import name_of
from tests.unit.supervisor.cluster.adoption.workloads import (
    COMPLETION,
    Json,
    adopted,
    made,
    pod,
    put,
    refused,
)


def test_an_index_is_read_from_the_environment_if_labels_do_not_have_it() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 4})
    by_field = {"JOB_COMPLETION_INDEX": f"metadata.annotations['{COMPLETION}-old']"}
    assert adopted(pod("a", job, {}, {f"{COMPLETION}-old": "3"}, by_field), job).order == (3,)
    assert adopted(pod("a", job, env={"JOB_COMPLETION_INDEX": "1"}), job).order == (1,)


def test_a_pod_that_was_not_injected_is_refused_with_the_webhooks_reason() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    member = pod("a", job)
    del member["metadata"]["annotations"]["holdfast.dev/injected"]
    assert "was not injected, and its holdfast.dev/nproc-per-node is not a number" in refused(member, job)
    member["metadata"]["annotations"]["holdfast.dev/nproc-per-node"] = "8"
    assert adopted(member, job).nproc == 8
    member["metadata"]["annotations"]["holdfast.dev/not-injected"] = "two containers could train"
    assert refused(member, job) == "the pod was not injected: 'two containers could train'"


def test_the_injected_number_of_ranks_takes_precedence_over_an_annotation_changed_later() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    assert adopted(pod("a", job, {}, {"holdfast.dev/nproc-per-node": "8"}, nproc=4), job).nproc == 4


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("metadata", 5, "metadata of the pod is 5; expected an object"),
        ("metadata.name", "A/b", "the pod's name is 'A/b', which is not valid"),
        ("metadata.uid", ["u"], "uid"),
        ("metadata.labels", ["a"], "labels of pod a is a list; expected an object"),
        ("metadata.labels", {COMPLETION: 3}, f"{COMPLETION} of pod a is 3; expected a string"),
        ("metadata.annotations", "x", "annotations of pod a is 'x'; expected an object"),
        ("metadata.ownerReferences", {}, "ownerReferences is a dict; expected a list"),
        ("metadata.ownerReferences", [None] * 65, "ownerReferences has 65 items; expected at most 64"),
        ("metadata.ownerReferences", [{"controller": True, "kind": "Job"}], "apiVersion in ownerReferences"),
        ("spec", "x", "spec of pod a is 'x'; expected an object"),
        ("spec.containers", [{"env": 5}], "containers of pod a is 5; expected a list"),
        ("status", 1, "status of pod a is 1; expected an object"),
    ],
)
def test_a_pod_with_a_wrong_type_is_refused_with_its_place(path: str, value: object, told: str) -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    member = pod("a", job)
    put(member, path, value)
    assert told in refused(member, job)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("members", "four", "is 'four'; expected a number up to 4096, or a range such as 2:4"),
        ("members", "4:2", "is '4:2'"),
        ("members", "99999", "is '99999'"),
        ("members", "\u0663", "expected a number"),
        ("members", 4, "is 4; expected a string"),
        ("injected", "{", "holdfast.dev/injected is not JSON"),
        ("injected", "\ud800", "holdfast.dev/injected is not JSON"),
        ("injected", "[1]", "holdfast.dev/injected is a list; expected an object"),
        ("injected", '{"nproc": true}', "nproc in holdfast.dev/injected is True"),
        ("injected", '{"nproc": 513}', "expected a whole number from 0 to 512"),
        ("injected", '{"nproc": 4, "members": [2]}', "members in holdfast.dev/injected of pod a is a list"),
        ("injected", " " * 20_000, "expected a string of at most 16384 characters"),
        ("group", "not a name", "is 'not a name', which is not valid"),
    ],
)
def test_an_annotation_with_a_mistake_is_refused(key: str, value: object, told: str) -> None:
    member = pod("a", None, {}, {"holdfast.dev/group": "g", f"holdfast.dev/{key}": value})
    assert told in refused(member)


# -- what is kept


def running(name: str = "a", **annotations: str) -> Json:
    """Return a pod as it runs on a cluster, with much that the supervisor does not read."""
    found = pod(name, made("batch/v1", "Job", "llama", {"parallelism": 2}), {COMPLETION: "1"}, annotations)
    found["metadata"] |= {"resourceVersion": "7", "managedFields": [{"fieldsV1": "x" * 9_000}]}
    found["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"] = "x" * 9_000
    found["spec"] |= {"nodeName": "n1", "volumes": [{"name": "v"}] * 50}
    states = [
        {"name": "logs", "state": {"running": {}}, "restartCount": 7},
        {"name": "train", "state": {"running": {"startedAt": "x"}}, "restartCount": 2, "containerID": "c"},
    ]
    found["status"] |= {"containerStatuses": states, "conditions": [{"message": "x" * 9_000}]}
    found["status"] |= {"podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}]}
    return found


@pytest.mark.parametrize("ended", [{}, {"phase": "Failed"}, {"phase": "Succeeded"}])
@pytest.mark.parametrize("leaving", [{}, {"deletionTimestamp": "2026-11-25T00:00:00Z"}])
def test_everything_that_reads_pods_reads_the_same_from_what_is_kept(ended: Json, leaving: Json) -> None:
    whole = running(**{"holdfast.dev/grace": "9s", "holdfast.dev/checkpoints": "pvc://claim"})
    whole["status"] |= ended
    whole["metadata"] |= leaving
    stored = kept(whole)
    assert len(json.dumps(stored)) < 2_000 < 25_000 < len(json.dumps(whole))
    assert training_container(stored) == training_container(whole) == "train"
    assert read_pod(stored, "train") == read_pod(whole, "train")
    assert ObjectReference.of(stored) == ObjectReference.of(whole)
    assert (name_of(stored), stored["metadata"]["resourceVersion"]) == (name_of(whole), "7")
    annotations = [each["metadata"]["annotations"] for each in (stored, whole)]
    assert pod_settings.parse(annotations[0]) == pod_settings.parse(annotations[1])
    assert pod_facts.read(stored).has_ended == pod_facts.read(whole).has_ended == bool(ended or leaving)
    assert kept(stored) == stored


def test_only_the_addresses_of_other_ip_families_are_kept_apart() -> None:
    whole = running()
    assert "podIPs" not in kept(whole)["status"]
    whole["status"]["podIPs"] = [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}, {"ip": 5}, "x"]
    stored = kept(whole)
    assert stored["status"]["podIPs"] == [{"ip": "fd00::7"}]
    assert read_pod(stored, "train") == read_pod(whole, "train")
    assert kept(stored) == stored


@pytest.mark.parametrize("ended", [{}, {"exitCode": 2, "message": "no " * 2_000}, {"exitCode": "2"}])
def test_how_a_container_ended_is_kept_and_its_message_is_short(ended: Json) -> None:
    whole = running()
    whole["status"] |= {"phase": "Failed"}
    whole["status"]["containerStatuses"][1]["state"] = {"terminated": {**ended, "containerID": "x" * 9_000}}
    stored = kept(whole)
    assert len(json.dumps(stored)) < 2_000
    assert read_pod(stored, "train") == read_pod(whole, "train")
    assert kept(stored) == stored


BULK = "x" * 1_200_000


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.annotations", {f"holdfast.dev/{number}": "x" * 250 for number in range(900)}),
        ("metadata.annotations", {"holdfast.dev/members": "9" * 200_000}),
        ("metadata.labels", {COMPLETION: BULK}),
        ("metadata.ownerReferences", [{"kind": "x" * 200, "name": "x" * 200}] * 64),
        ("metadata.ownerReferences", [{"controller": False}] * 65),
        ("spec.containers.1.env", [{"name": "NODE_RANK", "value": BULK}]),
        ("spec.containers.1.env", [{"name": "A"}] * 3_000),
        ("spec.containers", [{"name": "train", "env": [{"name": "NODE_RANK", "value": "1" * 9_000}]}] * 9),
        ("spec.containers", [{"name": "c"}] * 9_000),
    ],
)
def test_a_pod_that_states_too_much_is_not_a_member_and_stays_small(path: str, value: object) -> None:
    whole = running()
    put(whole, path, value)
    stored = kept(whole)
    assert len(json.dumps(stored)) < 2_000
    assert stored[CUT] in refused(stored)
    assert read_pod(stored, training_container(stored)) == read_pod(whole, training_container(whole))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.annotations.note", BULK),
        ("metadata.labels.note", BULK),
        ("spec.containers.1.env", [{"name": "A", "value": BULK}]),
        ("spec.containers.1.args", [BULK]),
        ("status.message", BULK),
    ],
)
def test_what_the_supervisor_does_not_read_may_be_large(path: str, value: object) -> None:
    whole = running()
    put(whole, path, value)
    assert len(json.dumps(kept(whole))) < 2_000
    assert adopted(whole, made("batch/v1", "Job", "llama", {"parallelism": 2})).members == 2


def test_of_variables_with_one_name_the_first_is_kept_and_the_training_container_is_first() -> None:
    whole = running()
    env = [{"name": "NODE_RANK", "value": str(number)} for number in (3, 4)]
    put(whole, "spec.containers.0.env", [{"name": "NODE_RANK", "value": "8"}])
    put(whole, "spec.containers.1.env", [{"name": "B", "value": "b"}, *env])
    containers = kept(whole)["spec"]["containers"]
    assert [each["name"] for each in containers] == ["train", "logs"]
    assert containers[0]["env"] == env[:1]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_PLACES = (
    *("metadata.annotations", "metadata.labels", "metadata.ownerReferences", "metadata.uid"),
    *("metadata.annotations.holdfast\u2024dev/injected", "spec", "status", "spec.containers"),
    *("spec.containers.1", "spec.containers.1.env", "spec.containers.1.name", "status.containerStatuses"),
)


@given(st.sampled_from(_PLACES), _JSON)
def test_pruning_never_fails_and_what_is_kept_is_read_or_refused(path: str, value: Any) -> None:
    """An exception would end the mirror, and with it the supervisor."""
    whole = running()
    put(whole, path, value)
    stored = KeptPods().keep(whole)
    try:
        pod_facts.read(stored)
    except UnfitObject:
        assert training_container(stored) is not None


def test_the_pods_of_one_namespace_share_a_limit_and_others_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_facts, "NAMESPACE_BYTES", 20_000)
    pods = KeptPods()

    def keep(name: str, namespace: str = "team", **annotations: str) -> bool:
        """Return True if the pod was kept with what it states."""
        found = running(name, **annotations)
        found["metadata"]["namespace"] = namespace
        stored = pods.keep(found)
        assert read_pod(stored, "train") == read_pod(found, "train"), "members keep their state"
        return CUT not in stored

    fit = [keep(f"a-{number}") for number in range(20)]
    count = sum(fit)
    assert fit == [True] * count + [False] * (20 - count)
    assert 4 < count < 10
    assert keep("b", namespace="other")
    assert keep("a-0"), "a pod that changes does not count twice"
    for number in range(count, 20):
        pods.forget("team", f"a-{number}")
    pods.forget("team", "a-0")
    pods.forget("team", "never kept")
    assert keep("a-30")
    pods.forget_all()
    assert [keep(f"c-{number}") for number in range(count)] == [True] * count
