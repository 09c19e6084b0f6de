from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.cli import assembly, commands


class Assembled(Exception):
    """The command has assembled an agent with these problems."""


@pytest.mark.parametrize("command", [commands.check, commands.watch])
def test_a_reader_names_the_state_of_the_service_that_it_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    service, mine = tmp_path / "service", tmp_path / "mine"
    service.mkdir()
    (service / "lock").touch()
    monkeypatch.setattr(commands, "ROOT_STATE", service)
    monkeypatch.setattr(assembly, "assemble", lambda *_, **__: SimpleNamespace(problems=("another",)))

    def agent(parts: Any, *_: Any) -> None:
        raise Assembled(*parts.problems)

    monkeypatch.setattr(commands, "_agent", agent)
    with pytest.raises(Assembled) as found:
        command(argparse.Namespace(state_dir=mine, for_s=1.0, json=False))
    assert found.value.args[0] == "another"
    assert f"what the agent saved in {service}" in found.value.args[1]
