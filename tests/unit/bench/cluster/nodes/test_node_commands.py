"""However the bench ends, no node stays killed or cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cluster.nodes import node_commands
from bench.cluster.nodes.node_commands import VARIABLES, NodeCommands, from_environment
from holdfast.errors import BadInput

EVERYTHING = ("kill", "start", "cut", "heal")


@pytest.fixture
def called(tmp_path: Path) -> Path:
    return tmp_path / "called"


@pytest.fixture
def commands(tmp_path: Path, called: Path) -> NodeCommands:
    """Return commands that record what is done; starting a node named stuck fails."""
    script = tmp_path / "node"
    fails = '[ "$1 $2" != "start stuck" ] || { echo no power >&2; exit 1; }'
    script.write_text(f'#!/bin/sh\necho "$1 $2" >> {called}\n{fails}\n')
    script.chmod(0o755)
    return from_environment({VARIABLES[what]: f"{script} {what}" for what in EVERYTHING}, EVERYTHING)


def test_each_missing_command_is_named() -> None:
    with pytest.raises(BadInput, match="set HOLDFAST_NODE_CUT, HOLDFAST_NODE_HEAL to commands that"):
        from_environment({"HOLDFAST_NODE_KILL": "a b", "HOLDFAST_NODE_START": "c"}, EVERYTHING)
    assert from_environment({"HOLDFAST_NODE_KILL": "a b", "HOLDFAST_NODE_START": "c"}, ("kill", "start"))
    assert from_environment({}, ())


def test_a_restored_node_is_not_restored_again(commands: NodeCommands, called: Path) -> None:
    with commands:
        commands.disturb("cut", "n1")
        commands.restore("n1")
        commands.restore("n1")
    assert called.read_text().splitlines() == ["cut n1", "heal n1"]


def test_all_nodes_are_restored_after_an_interrupt_even_if_one_cannot_be(
    commands: NodeCommands, called: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        with commands:
            commands.disturb("kill", "stuck")
            commands.disturb("cut", "n2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert called.read_text().splitlines() == ["kill stuck", "cut n2", "start stuck", "heal n2"]
    assert "WARNING: node stuck is still disturbed" in capsys.readouterr().out


def test_a_command_that_fails_names_what_it_was(tmp_path: Path) -> None:
    commands = from_environment({VARIABLES["kill"]: "sh -c 'echo gone >&2; exit 3'"}, ("kill",))
    with pytest.raises(RuntimeError, match=r"sh -c .* n1: gone"):
        commands.disturb("kill", "n1")
    assert node_commands.COMMAND_S > 0
