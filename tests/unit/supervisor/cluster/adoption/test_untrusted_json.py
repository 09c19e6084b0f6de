from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from supervisor.cluster.adoption.job_membership import Adopted, JobKey, NotAdopted, adopt, job_key, top_owner
from tests.unit.supervisor.cluster.adoption.workloads import (
    COMPLETION,
    JOBSET,
    OPTED_IN,
    Json,
    key_of,
    kubeflow,
    kubeflow_pod,
    kueue_pod,
    made,
    pod,
    put,
    refused,
)


def test_a_why_is_one_line_of_bounded_length_whatever_the_objects_say() -> None:
    long = "x\n" * 120
    jobs = [{"name": f"{long}{n}", "template": {"spec": {"parallelism": "2" * 200}}} for n in range(999)]
    jobset = made("jobset.x-k8s.io/v1alpha2", "JobSet", "l" * 200, {"replicatedJobs": jobs})
    why = refused(pod("a", jobset, {f"{JOBSET}replicatedjob-name": long}), jobset)
    assert why.isprintable()
    assert len(why) < 1_000


def _paths(raw: object, above: str = "") -> list[str]:
    """Return the path of each value in JSON. Keys with dots cannot be named and are omitted."""
    pairs = (
        list(raw.items()) if isinstance(raw, dict) else list(enumerate(raw)) if isinstance(raw, list) else []
    )
    found = []
    for key, value in pairs:
        if "." not in str(key):
            found += [f"{above}{key}", *_paths(value, f"{above}{key}.")]
    return found


TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["4", "2:4", "Worker", "true", "Pod", "Job", "v1", "batch/v1", "{}", "\ud800", "a-1", "-1"]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON, st.lists(JSON, max_size=3))
def test_any_json_is_adopted_or_refused_and_never_raises(
    raw: object, owner: object, group: list[object]
) -> None:
    owners = top_owner(raw, lambda _: owner)
    assert isinstance(job_key(raw, owners), JobKey | NotAdopted)
    assert isinstance(adopt(raw, owners, group), Adopted | NotAdopted)


def _realistic() -> list[tuple[Json, list[Json]]]:
    jobset = made("jobset.x-k8s.io/v1alpha2", "JobSet", "llama", {
        "replicatedJobs": [{"name": "w", "replicas": 2, "template": {"spec": {
            "parallelism": 2, "completions": 2, "template": OPTED_IN}}}],
    })  # fmt: skip
    job = made("batch/v1", "Job", "llama-w-1", {"parallelism": 2, "completions": 2}, jobset)
    torch = kubeflow("PyTorchJob", "pytorchReplicaSpecs", Master=1, Worker=3)
    return [
        (pod("llama-w-1-0", job, {f"{JOBSET}replicatedjob-name": "w", COMPLETION: "0"}), [job, jobset]),
        (kubeflow_pod(torch, "worker", 1, RANK="2", NODE_RANK="2"), [torch]),
        (kueue_pod("a", "0"), []),
    ]


@given(st.data())
def test_a_real_pod_with_any_value_replaced_is_adopted_or_refused(data: st.DataObject) -> None:
    member, objects = copy.deepcopy(data.draw(st.sampled_from(_realistic())))
    owners = {key_of(each): each for each in objects}
    for _ in range(data.draw(st.integers(1, 3))):
        raw = data.draw(st.sampled_from([member, *objects]))
        paths = _paths(raw)
        if paths:
            put(raw, data.draw(st.sampled_from(paths)), data.draw(JSON))
    found = adopt(member, top_owner(member, owners.get), [member])
    assert isinstance(found, Adopted | NotAdopted)
    if isinstance(found, NotAdopted):
        assert found.why
        assert found.why.isprintable()
    else:
        assert found.members > 0 < found.nproc
