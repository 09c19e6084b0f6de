"""The cluster bench names what is missing in the cluster, in one line and without a long wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as program
from bench.cluster import cluster, pod_objects
from bench.harness import results
from tests.unit.bench.cluster.conftest import SYSTEM, WEBHOOK
from tests.unit.supervisor.cli.on_cluster.stand_in import CONFIG, ApiStandIn

INSTALLS = "`kubectl apply -k manifests/default`"
Printed = pytest.CaptureFixture[str]


def refused(printed: Printed, kubectl: Path) -> str:
    """Return the message of a bench that has created nothing."""
    assert program.main(["cluster"]) == 2
    out, err = printed.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert not kubectl.with_name("kubectl.called").exists()
    return err.removeprefix("bench: ").rstrip()


def test_a_cluster_without_holdfast_is_refused_with_the_command_that_installs_it(
    server: ApiStandIn, capsys: Printed, kubectl: Path
) -> None:
    server.objects.clear()
    server.unknown = {"supervisions"}
    said = refused(capsys, kubectl)
    assert said == f"Holdfast is not installed in this cluster: install it with {INSTALLS}"
    assert {method for method, *_ in server.requests} == {"GET"}


@pytest.mark.parametrize("gone", [WEBHOOK, f"{SYSTEM}/holdfast-webhook", f"{SYSTEM}/holdfast-supervisor"])
def test_a_missing_part_is_named_with_the_command_that_installs_it(
    gone: str, server: ApiStandIn, capsys: Printed, kubectl: Path
) -> None:
    del server.objects[gone]
    said = refused(capsys, kubectl)
    assert "it does not exist" in said
    assert said.endswith(f"install Holdfast: {INSTALLS}")


def test_a_missing_resource_definition_is_named(server: ApiStandIn, capsys: Printed, kubectl: Path) -> None:
    server.unknown = {"supervisions"}
    assert refused(capsys, kubectl) == (
        f"the API server does not know supervisions.holdfast.dev; install Holdfast: {INSTALLS}"
    )


def test_a_missing_training_operator_is_named(server: ApiStandIn, capsys: Printed, kubectl: Path) -> None:
    server.unknown = {"pytorchjobs"}
    said = refused(capsys, kubectl)
    assert said.startswith("the API server does not know pytorchjobs.kubeflow.org; install version 1 of")


def test_a_supervisor_that_is_not_ready_is_named(server: ApiStandIn, capsys: Printed, kubectl: Path) -> None:
    server.objects[f"{SYSTEM}/holdfast-supervisor"]["status"] = {}
    assert "deployment holdfast-supervisor: 0 of 1 replicas are ready" in refused(capsys, kubectl)


def test_a_webhook_that_the_api_server_does_not_trust_is_named(
    server: ApiStandIn, capsys: Printed, kubectl: Path
) -> None:
    server.objects[WEBHOOK]["webhooks"] = [{"clientConfig": {}}]
    assert "the API server does not trust the webhook" in refused(capsys, kubectl)


def test_an_api_server_that_does_not_respond_is_named(
    capsys: Printed, kubectl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(CONFIG % "http://127.0.0.1:9")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    said = refused(capsys, kubectl)
    assert said.startswith("the API server does not respond: Cannot connect to host 127.0.0.1:9")


def test_without_kubectl_the_bench_is_refused(
    server: ApiStandIn, capsys: Printed, kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.unlink()
    monkeypatch.setenv("PATH", str(kubectl.parent))
    assert refused(capsys, kubectl).startswith("bench cluster needs kubectl, which is not on PATH")
    assert server.requests == []


def test_an_image_that_a_node_lacks_ends_the_bench_and_removes_its_namespace(
    server: ApiStandIn, capsys: Printed, kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "READY_S", 20.0)
    state = {"waiting": {"reason": "ErrImagePull"}}
    waiting = {"name": "trainer", "image": pod_objects.IMAGE, "state": state}
    pod: dict[str, Any] = {
        "metadata": {"name": "holdfast-0"},
        "spec": {"nodeName": "n0"},
        "status": {"containerStatuses": [waiting]},
    }
    kubectl.with_name("kubectl.pods").write_text(json.dumps({"items": [pod]}))
    assert program.main(["cluster"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"bench: node n0 does not have the image {pod_objects.IMAGE}")
    called = kubectl.with_name("kubectl.called").read_text().splitlines()
    assert [each.split()[:2] for each in (called[0], called[-1])] == [
        ["create", "namespace"],
        ["delete", "namespace"],
    ]
    assert not results.FOLDER.exists()
