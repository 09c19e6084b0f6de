from __future__ import annotations

import pytest

from tests.unit.supervisor.cluster.workloads import COMPLETION, adopted, made, pod, put, refused


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
        ("metadata.labels", {COMPLETION: 3}, f"{COMPLETION} of pod a is 3; expected a text"),
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
        ("members", 4, "is 4; expected a text"),
        ("injected", "{", "holdfast.dev/injected is not JSON"),
        ("injected", "\ud800", "holdfast.dev/injected is not JSON"),
        ("injected", "[1]", "holdfast.dev/injected is a list; expected an object"),
        ("injected", '{"nproc": true}', "nproc in holdfast.dev/injected is True"),
        ("injected", '{"nproc": 513}', "expected a whole number from 0 to 512"),
        ("injected", '{"nproc": 4, "members": [2]}', "members in holdfast.dev/injected of pod a is a list"),
        ("injected", " " * 20_000, "expected a text of at most 16384 characters"),
        ("group", "not a name", "is 'not a name', which is not valid"),
    ],
)
def test_an_annotation_with_a_mistake_is_refused(key: str, value: object, told: str) -> None:
    member = pod("a", None, {}, {"holdfast.dev/group": "g", f"holdfast.dev/{key}": value})
    assert told in refused(member)
