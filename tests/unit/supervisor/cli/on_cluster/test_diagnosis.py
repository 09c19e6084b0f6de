"""Each of the usual mistakes is found in the object that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cli.on_cluster import diagnosis
from supervisor.cli.on_cluster.diagnosis import DoctorFinding, PodSurroundings
from tests.unit.supervisor.cli.on_cluster.stand_in import supervision
from tests.unit.supervisor.status_samples import member, status

ASKS, INJECTED = {"holdfast.dev/inject": "true"}, {"holdfast.dev/injected": "{}"}
HOOK = {"clientConfig": {"caBundle": "PEM"}}


NOW_S = 1_795_000_000.0  # 2026-11-18T11:06:40Z
LATER = PodSurroundings(now_s=NOW_S)


def pod(annotations: dict[str, str] | None = None, phase: str = "Running", **changed: Any) -> dict[str, Any]:
    metadata = {"name": "gpt-0", "namespace": "team", "uid": "0123456789", "annotations": annotations or {}}
    metadata |= changed.pop("metadata", {})
    return {"metadata": metadata, "status": {"phase": phase, **changed}}


def job(*members: dict[str, Any], owner: str = "", **changed: Any) -> dict[str, Any]:
    view = status(members=list(members), **changed)
    made = supervision(view=view, spec={"owner": {"uid": owner}})
    return {**made, "metadata": {"name": "gpt", "namespace": "team"}}


def waiting(name: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (pod(), "it does not request Holdfast; give the pod template of its owner the annotation"),
        (pod(metadata={"labels": ASKS}), "holdfast.dev/inject is set as a label, but must be an"),
        (pod({"holdfast.dev/inject": "yes"}), "its annotation holdfast.dev/inject is 'yes', but only"),
        (pod({**ASKS, "holdfast.dev/not-injected": "no command"}), "not injected: no command; fix"),
        (pod({**ASKS, "kubernetes.io/config.mirror": "x"}), "it is a static pod, which no"),
        (pod(ASKS), "not injected: when it was created, no webhook responded or its namespace was excluded;"),
        (
            pod(ASKS | INJECTED, "Pending", conditions=[
                {"type": "PodScheduled", "status": "False", "message": "Insufficient\nmemory"}]),
            "it is not scheduled: Insufficient memory; see `kubectl describe pod`",
        ),
        (
            pod(ASKS | INJECTED, "Pending", initContainerStatuses=[waiting("setup", "ErrImagePull", "no")]),
            "its container setup does not start: ErrImagePull: no; see `kubectl describe pod gpt-0`",
        ),
        (
            pod(
                ASKS | INJECTED,
                containerStatuses=[waiting("main", "CrashLoopBackOff") | {"restartCount": 2}],
            ),
            "its container main does not start: CrashLoopBackOff; see `kubectl logs gpt-0 -c main",
        ),
        (pod(ASKS | INJECTED), "no Supervision lists it; the supervisor may be down"),
    ],
)  # fmt: skip
def test_a_pod_that_is_not_supervised_is_explained(found: dict[str, Any], said: str) -> None:
    examined = diagnosis.examine(found, LATER)
    assert examined.state == "problem"
    assert str(examined).startswith(f"problem  pod team/gpt-0: {said}")
    assert examined.remedy


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (pod(ASKS | INJECTED, "Succeeded"), "it was injected, and has ended"),
        (pod(ASKS | INJECTED, metadata={"deletionTimestamp": "now"}), "it is being deleted"),
        (
            pod(ASKS | INJECTED, "Pending", containerStatuses=[waiting("main", "PodInitializing")]),
            "it is injected, and is starting",
        ),
    ],
)
def test_a_pod_that_does_not_exist_yet_or_any_more_is_not_a_problem(found: dict[str, Any], said: str) -> None:
    assert diagnosis.examine(found, PodSurroundings()) == DoctorFinding("ok", "pod team/gpt-0", said)


def ended(name: str, code: int, **found: Any) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, **found}}}


MAIN = {"holdfast.dev/inject": "true", "holdfast.dev/injected": '{"container": "main"}'}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            pod(
                MAIN, "Failed", containerStatuses=[ended("web", 1), ended("main", 2, message="no\nscript\n")]
            ),
            "ended with exit code 2: no script",
        ),
        (pod(MAIN, "Failed", containerStatuses=[ended("main", 1)]), "ended with exit code 1"),
        (
            pod(MAIN, "Failed", containerStatuses=[ended("web", 4), ended("main", 0)]),
            "its container web ended with exit code 4",
        ),
        (pod(MAIN, "Failed", reason="Evicted", message="low on memory"), "it failed: low on memory"),
        (
            pod(MAIN, "Failed", reason="Evicted", containerStatuses=[ended("main", 143)]),
            "it failed: Evicted",
        ),
    ],
)
def test_a_pod_that_has_failed_is_a_problem(found: dict[str, Any], said: str) -> None:
    examined = diagnosis.examine(found, PodSurroundings())
    assert (examined.state, examined.text) == ("problem", said)
    assert examined.remedy.startswith("see `kubectl logs gpt-0 -n team -c ")


@pytest.mark.parametrize("code", [0, 130, 143])
def test_a_pod_that_was_told_to_end_is_no_problem(code: int) -> None:
    found = pod(MAIN, "Failed", containerStatuses=[ended("main", code)])
    assert diagnosis.examine(found, PodSurroundings()).state == "ok"
    deleted = pod(MAIN, "Failed", containerStatuses=[ended("main", 1)], metadata={"deletionTimestamp": "now"})
    assert diagnosis.examine(deleted, PodSurroundings()).state == "ok"


@pytest.mark.parametrize("name", ["gpt-0.01234567", "gpt-0.01234567.2"])
def test_a_member_of_a_job_is_supervised_if_its_sidecar_is_connected(name: str) -> None:
    found = pod(ASKS | INJECTED)
    connected = PodSurroundings((job(member("other.01234567", [1])), job(member(name, [0]))), now_s=NOW_S)
    assert diagnosis.examine(found, connected).state == "ok"
    silent = PodSurroundings((job(member(name, [0], connected=False)),), now_s=NOW_S)
    examined = diagnosis.examine(found, silent)
    assert examined.text == "its sidecar is not connected to the supervisor of job team/gpt"
    assert "NetworkPolicy" in examined.remedy
    assert "kubectl logs gpt-0 -c holdfast-sidecar" in examined.remedy


@pytest.mark.parametrize(
    ("started", "state"),
    [("2026-11-18T11:06:30Z", "ok"), ("2026-11-18T11:06:00Z", "problem"), ("odd", "problem")],
)
def test_a_pod_that_has_just_started_may_still_be_connecting(started: str, state: str) -> None:
    running = {"name": "main", "state": {"running": {"startedAt": started}}}
    found = pod(ASKS | INJECTED, containerStatuses=[running])
    assert diagnosis.examine(found, LATER).state == state
    refused = PodSurroundings((), ({"reason": "NotSupervised", "message": "no"},), now_s=NOW_S)
    assert diagnosis.examine(found, refused).state == "problem"


def test_a_sidecar_that_cannot_reach_its_launcher_is_a_problem() -> None:
    lonely = member("gpt-0.01234567", [], launcher_error="permission\ndenied")
    examined = diagnosis.examine(pod(ASKS | INJECTED), PodSurroundings((job(lonely),), now_s=NOW_S))
    assert (examined.state, examined.text) == (
        "problem",
        "Holdfast cannot start ranks in it: permission denied",
    )
    assert examined.remedy == "see `kubectl logs gpt-0`"


@pytest.mark.parametrize("phase", ["Running", "Failed"])
@pytest.mark.parametrize("limits", [{}, {"memory": "150Mi"}])
def test_a_container_that_ended_at_its_memory_limit_is_a_problem(phase: str, limits: dict[str, str]) -> None:
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    state = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": killed}
    of_main = {"name": "main", **(state if phase == "Running" else {"state": killed})}
    found = pod(
        ASKS | INJECTED, phase, containerStatuses=[{"name": "web", "state": {"running": {}}}, of_main]
    )
    found["spec"] = {"containers": [{"name": "web"}, {"name": "main", "resources": {"limits": limits}}]}
    examined = diagnosis.examine(found, PodSurroundings())
    of = " of 150Mi" if limits else ""
    assert (examined.state, examined.text) == (
        "problem",
        f"its container main was killed at its memory limit{of}",
    )
    assert "resources.limits.memory" in examined.remedy


def test_a_container_that_runs_again_after_it_ended_at_its_memory_limit_is_not_a_problem() -> None:
    again = {"name": "main", "state": {"running": {}}, "lastState": {"terminated": {"reason": "OOMKilled"}}}
    found = pod(ASKS | INJECTED, containerStatuses=[again])
    supervised = PodSurroundings((job(member("gpt-0.01234567", [0])),))
    assert diagnosis.examine(found, supervised).state == "ok"


def test_a_job_of_the_same_owner_that_does_not_list_the_pod_is_named() -> None:
    found = pod(ASKS | INJECTED, metadata={"ownerReferences": [{"uid": "job-1"}]})
    examined = diagnosis.examine(found, PodSurroundings((job(), job(owner="job-1")), now_s=NOW_S))
    assert examined.text == "job team/gpt does not list it: its sidecar has not connected yet"


def test_the_newest_event_explains_why_the_supervisor_refuses_a_pod() -> None:
    events = (
        {"reason": "NotSupervised", "lastTimestamp": "2026-11-25T03:00:00Z", "message": "old"},
        {"reason": "NotSupervised", "series": {"lastObservedTime": "2026-11-25T04:00:00Z"}, "message": "new"},
        {"reason": "Started", "lastTimestamp": "2026-11-25T05:00:00Z", "message": "other"},
    )
    examined = diagnosis.examine(pod(ASKS | INJECTED), PodSurroundings((), events))
    assert examined.text == "not supervised: new"


def test_an_excluded_namespace_is_the_reason_for_its_pods() -> None:
    around = PodSurroundings(excluded="its label a is 'b'")
    assert "its namespace is excluded (its label a is 'b')" in diagnosis.examine(pod(ASKS), around).text


def test_the_webhook_must_exist_and_be_trusted() -> None:
    assert diagnosis.webhook({"webhooks": [HOOK]}).state == "ok"
    assert diagnosis.webhook(None).remedy == diagnosis.INSTALL
    broken = diagnosis.webhook({"webhooks": [{"clientConfig": {}}]})
    assert "does not trust the webhook" in broken.text


def test_a_deployment_must_have_one_ready_replica() -> None:
    assert diagnosis.deployment("holdfast-webhook", None).state == "problem"
    none = diagnosis.deployment("holdfast-webhook", {"spec": {"replicas": 2}, "status": {}})
    assert (none.state, none.text) == ("problem", "0 of 2 replicas are ready")
    one = diagnosis.deployment("holdfast-webhook", {"spec": {"replicas": 2}, "status": {"readyReplicas": 1}})
    assert (one.state, one.text) == ("ok", "1 of 2 replicas are ready")


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        ({}, ""),
        ({"matchLabels": {"team": "a"}}, ""),
        ({"matchLabels": {"team": "b"}}, "it lacks the label team=b"),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]}, ""),
        (
            {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]},
            "its label team is 'a'",
        ),
        ({"matchExpressions": [{"key": "x", "operator": "Exists"}]}, "its label x is 'missing'"),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, "its label team is 'a'"),
    ],
)
def test_a_namespace_is_compared_with_the_webhooks_selector(selector: dict[str, Any], why: str) -> None:
    space = {"metadata": {"labels": {"team": "a"}}}
    assert diagnosis.exclusion(space, {"webhooks": [{"namespaceSelector": selector}]}) == why


def test_a_system_namespace_cannot_contain_jobs() -> None:
    assert diagnosis.namespace("team", "").state == "ok"
    assert "kubectl label namespace" in diagnosis.namespace("team", "it lacks the label a=b").remedy
    assert diagnosis.namespace("kube-system", "x").remedy == "run jobs in another namespace"


def test_a_missing_standby_is_reported_while_the_job_runs() -> None:
    standbys = {"wanted": 1, "problem": "exceeded quota:\n gpus"}
    lacking = job()
    lacking["status"]["standbys"] = standbys
    [found] = diagnosis.job(lacking)
    assert found.text == "it lacks a standby: exceeded quota: gpus"
    ended = job(phase="ended", exit_code=0)
    ended["status"]["standbys"] = standbys
    assert list(diagnosis.job(ended)) == []
    lacking["status"]["standbys"] = {**standbys, "problem": ""}
    assert list(diagnosis.job(lacking)) == []


def test_a_memory_volume_that_is_too_small_is_reported_with_the_annotation_that_helps() -> None:
    memory = {"state_bytes": 3 << 30, "needed_bytes": 8 << 30, "available_bytes": 1 << 30}
    [found] = diagnosis.job(job(memory=memory))
    assert found.what == "job team/gpt"
    assert found.remedy == 'give its pods the annotation holdfast.dev/state-size: "3072Mi"'
    assert list(diagnosis.job(job(memory={**memory, "available_bytes": 9 << 30}))) == []
    assert list(diagnosis.job(job(memory=None))) == []


def test_a_refused_job_is_explained() -> None:
    [found] = diagnosis.job(job(phase="ended", exit_code=2, message="not enough memory: a state\nmore"))
    assert found.text == "it was refused: not enough memory: a state"


def test_a_job_that_has_failed_is_a_problem_with_its_reason() -> None:
    why = "the script failed 3 times before it joined: ModuleNotFoundError: No module named 'nosuchmodule'"
    [found] = diagnosis.job(job(phase="ended", exit_code=1, message=f"{why}\nmore"))
    assert (found.state, found.text) == ("problem", f"it ended with exit code 1: {why}")
    assert found.remedy == "see `holdfast status --job gpt -n team`"


@pytest.mark.parametrize("code", [0, 130, 143, None])
def test_a_job_that_finished_or_was_stopped_is_no_problem(code: int | None) -> None:
    assert list(diagnosis.job(job(phase="ended", exit_code=code))) == []
