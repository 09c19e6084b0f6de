from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.agent import claim, saved_state
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


def foreign(mine: Path, monkeypatch: pytest.MonkeyPatch, service: Path, pods: Path) -> str | None:
    monkeypatch.setattr(commands, "ROOT_STATE", service)
    monkeypatch.setattr(commands, "PODS_STATES", pods)
    monkeypatch.setattr(commands, "state_folder", lambda: service)
    return commands._foreign_memory(argparse.Namespace(state_dir=mine))


def test_a_reader_on_the_host_names_the_folder_of_the_agent_in_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pods = tmp_path / "node", tmp_path / "nodes"
    assert foreign(host, monkeypatch, host, pods) is None
    (pods / "gpu-17").mkdir(parents=True)
    assert foreign(host, monkeypatch, host, pods) is None, "no agent has used it"
    (pods / "gpu-17" / claim.LOCK).touch()
    found = foreign(host, monkeypatch, host, pods)
    assert found is not None
    assert f"--state-dir {pods / 'gpu-17'}" in found
    assert foreign(pods / "gpu-17", monkeypatch, host, pods) is None, "it is the one that is read"


def test_an_old_state_of_the_host_does_not_hide_that_an_agent_runs_in_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pods = tmp_path / "node", tmp_path / "nodes"
    saved_state.save(host, saved_state.SavedState())
    folder = pods / "gpu-17"
    folder.mkdir(parents=True)
    taken = claim.take(folder)
    assert f"saved in {folder}" in (foreign(host, monkeypatch, host, pods) or "")
    taken.release()
    assert foreign(host, monkeypatch, host, pods) is None, "the pod's agent has ended"
