"""Only owners that create an evicted pod again, with Holdfast, lose a pod."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from supervisor.admission.pod_layout import INJECT
from supervisor.cluster.missed import recreation
from tests.unit.supervisor.cluster.adoption.workloads import Json, made, pod

IGNORED: Json = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [90]}},
    ]
}


def why_not(owner: Json, **annotations: str) -> str:
    found = pod("gpt-1", owner, annotations=annotations)
    reference = recreation.controller_of(found)
    assert reference is not None
    return recreation.why_not(found, reference, owner)


def job(failed: int = 0, **spec: Any) -> Json:
    return {**made("batch/v1", "Job", "gpt", spec), "status": {"failed": failed}}


@pytest.mark.parametrize(
    ("api_version", "kind"),
    [
        ("batch/v1", "Job"),
        ("apps/v1", "StatefulSet"),
        ("apps/v1", "ReplicaSet"),
        ("kubeflow.org/v1", "PyTorchJob"),
        ("kubeflow.org/v2beta1", "MPIJob"),
    ],
)
def test_these_owners_create_an_evicted_pod_again(api_version: str, kind: str) -> None:
    assert why_not(made(api_version, kind, "gpt")) == ""


@pytest.mark.parametrize(
    ("api_version", "kind"),
    [
        ("batch.volcano.sh/v1alpha1", "Job"),
        ("v1", "Pod"),
        ("corp.example/v1", "Trainer"),
        ("apps/v1", "Deployment"),
    ],
)
def test_a_pod_of_any_other_owner_stays(api_version: str, kind: str) -> None:
    assert f"{kind} gpt, is not known to create a pod" in why_not(made(api_version, kind, "gpt"))


def test_a_pod_that_nothing_controls_has_no_controller() -> None:
    found = pod("gpt-1", made("v1", "ConfigMap", "gpt"))
    found["metadata"]["ownerReferences"][0]["controller"] = False
    assert recreation.controller_of(found) is None
    assert recreation.controller_of(pod("gpt-1")) is None


def test_a_pod_stays_if_its_owner_is_replaced_or_goes() -> None:
    owner = made("apps/v1", "StatefulSet", "gpt")
    found = pod("gpt-1", owner)
    reference = recreation.controller_of(found)
    assert reference is not None
    other = copy.deepcopy(owner)
    other["metadata"]["uid"] = "another"
    assert "replaced" in recreation.why_not(found, reference, other)
    owner["metadata"]["deletionTimestamp"] = "2026-11-27T00:00:00Z"
    assert "being deleted" in recreation.why_not(found, reference, owner)


@pytest.mark.parametrize(
    "owner",
    [
        job(suspend=True),
        made("apps/v1", "StatefulSet", "gpt", {"replicas": 0}),
        made("kubeflow.org/v1", "PyTorchJob", "gpt", {"runPolicy": {"suspend": True}}),
    ],
)
def test_a_pod_stays_if_its_owner_is_suspended(owner: Json) -> None:
    assert "suspended" in why_not(owner)


def test_a_pod_stays_if_its_owner_has_opted_out_since() -> None:
    template = {"metadata": {"annotations": {INJECT: "false"}}}
    assert "no longer requests" in why_not(made("apps/v1", "StatefulSet", "gpt", {"template": template}))
    template["metadata"]["annotations"][INJECT] = "true"
    assert why_not(made("apps/v1", "StatefulSet", "gpt", {"template": template})) == ""


def test_a_job_that_would_fail_keeps_its_pod() -> None:
    assert why_not(job(failed=5)) == ""
    assert "backoffLimit 6" in why_not(job(failed=6))
    assert "backoffLimit 0" in why_not(job(backoffLimit=0))
    assert why_not(job(failed=9, backoffLimit=0, podFailurePolicy=IGNORED)) == ""


def test_a_rule_about_exit_codes_before_it_may_count_the_eviction() -> None:
    earlier = {"rules": [IGNORED["rules"][1], IGNORED["rules"][0]]}
    assert "backoffLimit 0" in why_not(job(backoffLimit=0, podFailurePolicy=earlier))
    counted = {"rules": [{**IGNORED["rules"][0], "action": "Count"}]}
    assert "backoffLimit 0" in why_not(job(backoffLimit=0, podFailurePolicy=counted))


def test_each_index_of_a_job_has_its_own_limit() -> None:
    owner = job(failed=50, backoffLimitPerIndex=2)
    assert why_not(owner, **{recreation.FAILURES: "1"}) == ""
    assert "backoffLimit 2" in why_not(owner, **{recreation.FAILURES: "2"})


def test_an_owner_that_cannot_be_understood_keeps_its_pod() -> None:
    assert "cannot be understood" in why_not({**job(), "spec": []})
