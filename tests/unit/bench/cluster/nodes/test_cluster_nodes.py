"""The bench of node faults names what is missing before it creates or disturbs anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as program
from bench.cluster.installation import takes_pods
from bench.cluster.nodes.cluster_nodes import needed_commands, parsed
from bench.cluster.nodes.node_commands import VARIABLES
from tests.unit.bench.cluster.conftest import SYSTEM
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set all commands to one that notes that it was run, and return the file of the notes."""
    script = tmp_path / "node"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/done\n')
    script.chmod(0o755)
    for name in VARIABLES.values():
        monkeypatch.setenv(name, str(script))
    return tmp_path / "done"


def node(ready: str = "True", **spec: object) -> dict[str, Any]:
    return {"spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def refused(printed: Printed, kubectl: Path, commands: Path, *options: str) -> str:
    """Return the message of a bench that has created and disturbed nothing."""
    assert program.main(["cluster-nodes", *options]) == 2
    out, err = printed.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert not kubectl.with_name("kubectl.called").exists()
    assert not commands.exists()
    return err.removeprefix("bench: ").rstrip()


def test_missing_commands_are_named_unless_they_are_not_needed(
    server: ApiStandIn, capsys: Printed, kubectl: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_NODE_HEAL")
    monkeypatch.delenv("HOLDFAST_NODE_KILL")
    uncut = ("--cuts=0", "--leader-cuts=0")
    words = "to commands that, followed by the name of a node, do this to the node"
    assert refused(capsys, kubectl, commands) == f"set HOLDFAST_NODE_KILL, HOLDFAST_NODE_HEAL {words}"
    assert refused(capsys, kubectl, commands, *uncut) == f"set HOLDFAST_NODE_KILL {words}"
    server.put("/api/v1/nodes/n1", node())
    without = (*uncut, "--kills=0", "--leader-nodes=0", "--bare=0")
    assert "expected at least 3" in refused(capsys, kubectl, commands, *without)


def test_what_is_missing_of_the_installation_is_named(
    server: ApiStandIn, capsys: Printed, kubectl: Path, commands: Path
) -> None:
    del server.objects[f"{SYSTEM}/holdfast-supervisor"]
    assert "it does not exist" in refused(capsys, kubectl, commands)


def test_three_nodes_must_be_ready_and_schedulable(
    server: ApiStandIn, capsys: Printed, kubectl: Path, commands: Path
) -> None:
    server.put("/api/v1/nodes/n1", node())
    server.put("/api/v1/nodes/n2", node("Unknown"))
    server.put("/api/v1/nodes/n3", node(unschedulable=True))
    said = refused(capsys, kubectl, commands)
    assert said == "1 node of the cluster is ready and schedulable; expected at least 3"
    assert not takes_pods({})


def test_each_kind_of_fault_has_a_count_and_the_cost_a_duration() -> None:
    nodes = ("kills", "leader_nodes", "bare", "cuts", "leader_cuts")
    kinds = (*nodes, "drains", "preemptions", "leaders", "verdicts")
    defaults = vars(parsed([]))
    assert {name: type(defaults[name]) for name in kinds} == dict.fromkeys(kinds, int)
    assert defaults["rest"] == 60.0
    given = parsed([f"--{name.replace('_', '-')}=0" for name in (*kinds, "rest")])
    assert {name: getattr(given, name) for name in (*kinds, "rest")} == dict.fromkeys((*kinds, "rest"), 0)
    assert needed_commands(given) == []
    assert needed_commands(parsed([])) == ["kill", "start", "cut", "heal"]
