"""The demo refuses an unsuitable cluster in one line, before it creates anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import parts
from supervisor import __main__ as program
from supervisor.cli.on_cluster.demo import installation
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed, refused

SYSTEM = "/api/v1/namespaces/holdfast-system"


@pytest.fixture(autouse=True)
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to a folder with only a kubectl that records its arguments and fails."""
    made = tmp_path / "bin" / "kubectl"
    made.parent.mkdir()
    made.write_text('#!/bin/sh\necho "$@" >> "$0.called"\necho no such luck >&2\nexit 1\n')
    made.chmod(0o755)
    monkeypatch.setenv("PATH", str(made.parent))
    return made


@pytest.mark.usefixtures("nothing_configured")
def test_without_a_cluster_the_demo_is_refused(capsys: Printed) -> None:
    assert refused("demo --cluster", capsys).startswith("no cluster is configured: KUBECONFIG is not set")


def test_without_kubectl_the_demo_is_refused(capsys: Printed, kubectl: Path) -> None:
    kubectl.unlink()
    assert refused("demo --cluster", capsys).startswith("demo --cluster needs kubectl, which is not on PATH")


def test_without_a_checkout_the_demo_is_refused(
    capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "folder", lambda: tmp_path)
    assert "run it in a clone of the repository" in refused("demo --cluster", capsys)


def last_error(capsys: Printed) -> str:
    """Run the demo, which fails after its start, and return its message."""
    assert program.main(["demo", "--cluster"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def posted(server: ApiStandIn) -> set[str]:
    """Return the objects that were created."""
    made = {path for method, path, _ in server.requests if method != "GET"}
    return made - {"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"}


def test_without_the_right_to_install_the_demo_is_refused_and_changes_nothing(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch, kubectl: Path
) -> None:
    monkeypatch.setattr(
        installation.Installation, "_may", lambda _, right: right not in installation.INSTALL_RIGHTS
    )
    said = refused("demo --cluster", capsys)
    assert "you may not create customresourcedefinitions.apiextensions.k8s.io in this cluster" in said
    assert "rights of a cluster administrator" in said
    assert posted(server) == set()
    assert not kubectl.with_name("kubectl.called").exists()


def test_a_partial_installation_of_others_is_left_alone(capsys: Printed, server: ApiStandIn) -> None:
    server.put(SYSTEM, {})
    assert "Holdfast is only partly installed in it: `holdfast doctor`" in refused("demo --cluster", capsys)
    assert posted(server) == set()


def test_a_namespace_that_is_being_deleted_is_waited_for_by_the_user(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.put(SYSTEM, {"status": {"phase": "Terminating"}})
    assert "is being deleted: try again when it is gone" in refused("demo --cluster", capsys)
    assert posted(server) == set()


def test_objects_of_a_refused_installation_are_removed_again(
    capsys: Printed, server: ApiStandIn, kubectl: Path
) -> None:
    server.put(SYSTEM, {"metadata": {"annotations": {installation.MADE_BY: "demo"}}})  # left by a killed demo
    assert "Holdfast cannot be installed: no such luck" in last_error(capsys)
    called = kubectl.with_name("kubectl.called").read_text().splitlines()
    assert [each.split()[:2] for each in called] == [["apply", "-k"], ["delete", "-k"]]


def test_an_installation_that_a_job_has_begun_to_use_stays(
    capsys: Printed, server: ApiStandIn, kubectl: Path
) -> None:
    server.put(SYSTEM, {"metadata": {"annotations": {installation.MADE_BY: "demo"}}})
    server.job()
    assert program.main(["demo", "--cluster"]) == 2
    assert (
        "Holdfast stays installed, because others use it (job research/gpt): `kubectl delete -k"
        in capsys.readouterr().out
    )
    assert "delete" not in kubectl.with_name("kubectl.called").read_text()
