from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from nodeagent.agent import saved_state
from nodeagent.agent.saved_state import SavedState
from nodeagent.cli import assembly, options

PATIENCE_S = 20.0


def test_an_agent_starts_without_its_state_while_the_disk_hangs_and_learns_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hanging(_: Path, *, set_aside: bool) -> tuple[SavedState, tuple[str, ...]]:
        assert answers.wait(PATIENCE_S)
        return SavedState(), ()

    monkeypatch.setattr(saved_state, "load", hanging)
    monkeypatch.setattr(assembly, "DISK_S", 0.05)
    parts = assembly.assemble(options.parse(["serve", "--state-dir", str(tmp_path)]), keeps=True)
    assert "the disk has not answered" in parts.problems[0]
    assert (parts.folder, parts.claim) == (None, None), "it may not replace the state that it has not read"
    assert parts.disk_answers is not None
    assert not parts.disk_answers.is_set()
    answers.set()
    assert parts.disk_answers.wait(PATIENCE_S)


def test_bad_input_from_the_state_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(BadInput, match="expected a writable folder"):
        assembly.assemble(options.parse(["serve", "--state-dir", str(tmp_path / "state")]), keeps=True)


def test_the_name_of_the_node_is_an_option_or_the_variable_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("5f0a31c2\n")
    words = ["check", "--state-dir", str(tmp_path), "--root", str(tmp_path)]
    monkeypatch.setenv(options.NODE_NAME, "node-7")
    monkeypatch.setenv(options.PROVIDER_ID, "aws:///i-1")
    about = assembly.assemble(options.parse(words), keeps=False).about()
    assert (about["node"], about["machine_id"], about["provider_id"]) == ("node-7", "5f0a31c2", "aws:///i-1")
    named = assembly.assemble(options.parse([*words, "--node-name", "node-8"]), keeps=False).about()
    assert named["node"] == "node-8"
