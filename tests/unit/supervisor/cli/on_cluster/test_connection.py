"""A command that cannot use its cluster prints the reason in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from supervisor import __main__ as program
from tests.unit.supervisor.cli.on_cluster.stand_in import CONFIG, ApiStandIn

Printed = pytest.CaptureFixture[str]


def refused(line: str, printed: Printed) -> str:
    """Return the message of a command that ends with exit code 2."""
    assert program.main(line.split()) == 2
    out, err = printed.readouterr()
    assert out == ""
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1
    return err.removeprefix("holdfast: ").rstrip()


@pytest.mark.usefixtures("nothing_configured")
def test_without_a_configuration_the_searched_places_are_named(capsys: Printed) -> None:
    said = refused("jobs", capsys)
    assert said.startswith("no cluster is configured: KUBECONFIG is not set, ~/.kube/config does not exist")


def test_a_kubeconfig_that_does_not_exist_is_named(
    capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert refused("jobs", capsys) == f"the kubeconfig {tmp_path / 'none'} does not exist"


def test_an_unknown_context_is_named(capsys: Printed, server: ApiStandIn) -> None:
    said = refused("status --job gpt --context nope", capsys)
    assert said == "no context 'nope' in the kubeconfig: `kubectl config get-contexts` lists all contexts"
    assert server.requests == []


def test_a_server_that_does_not_answer_is_named(
    capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(CONFIG % "http://127.0.0.1:9")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    said = refused("jobs", capsys)
    assert said.startswith("the API server does not respond: Cannot connect to host 127.0.0.1:9")


def test_rejected_credentials_are_reported(capsys: Printed, server: ApiStandIn) -> None:
    server.refusal = 401
    assert "does not accept the credentials of your kubeconfig" in refused("jobs", capsys)


def test_another_refusal_is_passed_on(capsys: Printed, server: ApiStandIn) -> None:
    server.refusal = 418
    assert refused("jobs", capsys) == "the API server refused the request: GET supervisions research: no"


@pytest.mark.parametrize(
    ("line", "denied", "said"),
    [
        ("jobs", "list", "holdfast-view has that right, as do view, edit and admin"),
        ("status --job gpt", "get", "holdfast-view has that right, as do view, edit and admin"),
        ("stop --job gpt", "patch", "holdfast-edit has that right, as do edit and admin"),
    ],
)
def test_a_missing_right_is_named_with_the_role_that_has_it(
    capsys: Printed, server: ApiStandIn, line: str, denied: str, said: str
) -> None:
    server.job()
    server.denied.add((denied, "supervisions"))
    right = f"forbidden: 'eva' may not {denied} supervisions in namespace 'research'"
    assert refused(line, capsys) == f"{right}; the ClusterRole {said}"


def test_a_cluster_without_holdfast_is_reported_with_how_to_install_it(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.unknown.add("supervisions")
    for line in ("jobs", "status --job gpt"):
        assert refused(line, capsys).startswith("Holdfast is not installed in this cluster: install it with")


def test_a_missing_library_is_reported_in_one_line(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert refused("jobs", capsys).endswith("pip install 'holdfast[cluster]'")


def test_commands_about_this_machine_do_not_import_the_library() -> None:
    code = (
        "import sys; from supervisor import __main__ as program\n"
        "assert program.main(['status', '--run-dir', '/nonexistent']) == 2\n"
        "sys.exit(any(n.partition('.')[0] == 'kubernetes' or 'on_cluster' in n for n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
