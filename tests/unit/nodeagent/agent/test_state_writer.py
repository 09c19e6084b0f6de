from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nodeagent.agent import claim, saved_state, state_writer
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.state_writer import StateWriter

PATIENCE_S = 20.0


class Disk:
    """A disk that may hang, and what was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.entered = threading.Event(), threading.Event()
        self.written: list[float] = []
        self._write = saved_state.write
        monkeypatch.setattr(saved_state, "write", self._slow)

    def _slow(self, folder: Path, content: bytes, generation: int = 0) -> None:
        self.entered.set()
        assert self.answers.wait(PATIENCE_S)
        self._write(folder, content, generation)
        self.written.append(saved_state.load(folder)[0].last_s)


def content(last_s: float) -> bytes:
    return saved_state.encode(SavedState(last_s=last_s))


def test_after_a_hang_the_newest_state_is_written_and_those_before_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, done = Disk(monkeypatch), threading.Semaphore(0)
    writer = StateWriter(tmp_path, None, done.release, lambda: None)
    assert writer.submit(content(1.0)) == 1
    assert disk.entered.wait(PATIENCE_S)
    numbers = [writer.submit(content(float(n))) for n in (2, 3, 4)]
    assert writer.outcome.number == 0
    assert not writer.finish(0.0)
    disk.answers.set()
    assert done.acquire(timeout=PATIENCE_S)
    assert writer.finish(PATIENCE_S)
    assert disk.written == [1.0, 4.0]
    assert (writer.outcome.number, writer.outcome.problem) == (numbers[-1], "")
    assert claim.take(tmp_path).generation == 0, "the folder is free"


def test_a_writer_that_was_taken_over_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "ANSWER_EVERY_S", 3600.0)
    superseded = threading.Event()
    writer = StateWriter(tmp_path, claim.take(tmp_path), lambda: None, superseded.set)
    successor = claim.take(tmp_path, 0.0)
    saved_state.save(tmp_path, SavedState(last_s=7.0), successor.generation)
    writer.submit(content(1.0))
    assert superseded.wait(PATIENCE_S)
    assert writer.finish(PATIENCE_S)
    assert saved_state.load(tmp_path)[0].last_s == 7.0
    assert not (tmp_path / saved_state.NAME).exists()


def test_an_idle_writer_answers_a_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_writer, "ANSWER_EVERY_S", 0.05)
    writer = StateWriter(tmp_path, claim.take(tmp_path), lambda: None, lambda: None)
    with pytest.raises(claim.FolderInUse):
        claim.take(tmp_path, PATIENCE_S)
    assert writer.finish(PATIENCE_S)
