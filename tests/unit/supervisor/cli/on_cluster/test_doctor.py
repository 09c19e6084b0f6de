"""The doctor reads the cluster, and prints one line for each part."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor import __main__ as program
from supervisor.cli.on_cluster import doctor
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed, refused
from tests.unit.supervisor.cli.on_cluster.test_job_source import document, printed
from tests.unit.supervisor.status_samples import member, status

PODS = "/api/v1/namespaces/research/pods"
ASKS = {"holdfast.dev/inject": "true"}


@pytest.fixture
def healthy(server: ApiStandIn) -> ApiStandIn:
    """A cluster with Holdfast installed, and a job of one pod."""
    hook = {"clientConfig": {"caBundle": "PEM"}}
    kind = "mutatingwebhookconfigurations"
    server.put(f"/apis/admissionregistration.k8s.io/v1/{kind}/holdfast-webhook", {"webhooks": [hook]})
    for name in ("holdfast-webhook", "holdfast-supervisor"):
        path = f"/apis/apps/v1/namespaces/holdfast-system/deployments/{name}"
        server.put(path, {"spec": {"replicas": 1}, "status": {"readyReplicas": 1}})
    server.put("/api/v1/namespaces/research", {})
    server.job(view=status(members=[member("gpt-0.uid-gpt-", [0])]))
    add_pod(server, "gpt-0", **ASKS, **{"holdfast.dev/injected": "{}"})
    return server


def add_pod(server: ApiStandIn, pod_name: str, /, **annotations: str) -> dict[str, Any]:
    body = {"metadata": {"annotations": annotations}, "status": {"phase": "Running"}}
    return server.put(f"{PODS}/{pod_name}", body)


def test_a_healthy_cluster_has_a_line_for_each_part(capsys: Printed, healthy: ApiStandIn) -> None:
    add_pod(healthy, "somebody-else-s")
    assert printed("doctor", capsys).splitlines() == [
        "ok       webhook configuration: the API server sends new pods to the webhook, and trusts it",
        "ok       deployment holdfast-webhook: 1 of 1 replicas are ready",
        "ok       deployment holdfast-supervisor: 1 of 1 replicas are ready",
        "ok       namespace research: its pods can be injected",
        "ok       your rights in namespace research: you may view jobs, stop them and inject faults",
        "ok       pod research/gpt-0: it is injected, and supervised as a member of job research/gpt",
        "no problem found",
    ]


def test_a_named_pod_is_examined_even_if_it_has_not_opted_in(capsys: Printed, healthy: ApiStandIn) -> None:
    add_pod(healthy, "plain")
    out = printed("doctor plain", capsys, 1)
    assert "problem  pod research/plain: it does not request Holdfast" in out
    assert out.endswith("1 problem found\n")
    assert "gpt-0" not in out
    assert printed("doctor research/gpt-0", capsys).endswith("no problem found\n")


def test_findings_are_also_printed_as_json(capsys: Printed, healthy: ApiStandIn) -> None:
    found = document("doctor --json", capsys)
    assert {*found[0]} == {"schema", "state", "what", "text", "remedy"}
    assert {each["state"] for each in found} == {"ok"}


def test_events_of_a_pod_are_read(capsys: Printed, healthy: ApiStandIn) -> None:
    made = add_pod(healthy, "lonely", **ASKS, **{"holdfast.dev/injected": "{}"})
    event = {
        "reason": "NotSupervised",
        "message": "no owner",
        "involvedObject": {"uid": made["metadata"]["uid"]},
    }
    healthy.put("/api/v1/namespaces/research/events/e1", event)
    assert "pod research/lonely: not supervised: no owner" in printed("doctor", capsys, 1)


def test_a_cluster_without_holdfast_lists_every_missing_part(capsys: Printed, server: ApiStandIn) -> None:
    server.put("/api/v1/namespaces/research", {})
    server.unknown.add("supervisions")
    lines = printed("doctor", capsys, 1).splitlines()
    assert [each.split()[0] for each in lines[:4]] == ["problem"] * 4
    assert all("install Holdfast" in each for each in lines[:4])
    assert "no pod in it has the annotation holdfast.dev/inject" in lines[-2]


def test_objects_that_the_user_may_not_read_are_unknown_and_not_a_problem(
    capsys: Printed, healthy: ApiStandIn
) -> None:
    for plural in ("mutatingwebhookconfigurations", "deployments", "namespaces", "events"):
        healthy.denied.add(("*", plural))
    lines = printed("doctor", capsys).splitlines()
    assert [each.split()[0] for each in lines] == ["unknown"] * 4 + ["ok"] * 2 + ["no"]
    assert "'eva' may not get deployments in namespace 'holdfast-system'" in lines[1]
    healthy.denied.add(("*", "pods"))
    assert "unknown  pods of namespace research: not examined" in printed("doctor", capsys)


def test_missing_rights_are_named(capsys: Printed, healthy: ApiStandIn) -> None:
    healthy.denied.add(("patch", "supervisions"))
    assert "you may view jobs, but not change them: stop and inject need" in printed("doctor", capsys)
    healthy.denied.add(("*", "supervisions"))
    out = printed("doctor", capsys, 1)
    assert "problem  your rights in namespace research: forbidden: 'eva' may not list supervisions" in out


def test_a_long_list_of_pods_is_shortened(
    capsys: Printed, healthy: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MAX_PODS", 2)
    for number in range(4):
        add_pod(healthy, f"late-{number}", **ASKS)
    lines = printed("doctor", capsys, 1).splitlines()
    assert lines[-2:] == [
        "problem  namespace research: 3 more pods, 2 of them with a problem",
        "3 problems found",
    ]


def test_an_unknown_pod_or_namespace_is_bad_input(capsys: Printed, healthy: ApiStandIn) -> None:
    said = refused("doctor gpt-1", capsys)
    lists = "`kubectl get pods -n research` lists its pods"
    assert said == f"no pod 'gpt-1' in namespace 'research': did you mean 'gpt-0'? {lists}"
    assert refused("doctor -n nowhere", capsys).startswith("namespace 'nowhere' does not exist")
    assert program.main(["doctor", "a/b", "-n", "c"]) == 2
