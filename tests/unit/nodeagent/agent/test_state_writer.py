from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from holdfast.fileio import durable
from nodeagent.agent import claim, saved_state, state_writer, unsaved
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


class FullDisk:
    """A disk on which no file can be created or replaced while it is full; existing blocks can be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._replace = durable.replace_file
        monkeypatch.setattr(durable, "replace_file", self._replace_file)

    def _replace_file(self, target: Path, content: bytes, mode: int = 0o666) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._replace(target, content, mode)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def write(folder: Path, state: SavedState) -> str:
    """Write a state as an agent does that then ends. Returns the problem."""
    writer = StateWriter(folder, claim.take(folder), lambda: None, lambda: None)
    writer.submit(saved_state.encode(state))
    assert writer.finish(PATIENCE_S)
    return writer.outcome.problem


def test_a_start_after_a_save_that_failed_knows_that_its_state_is_out_of_date(
    tmp_path: Path, disk: FullDisk
) -> None:
    first = SavedState(last_s=1.0)
    assert write(tmp_path, first) == ""
    disk.is_full = True
    assert write(tmp_path, SavedState(last_s=2.0, id=first.id)).endswith("No space left on device")
    disk.is_full = False
    found, problems = saved_state.load(tmp_path)
    assert (found.last_s, found.id != first.id) == (1.0, True)
    assert problems == (f"{tmp_path / 'memory.json'} is out of date: a later state could not be saved",)
    assert write(tmp_path, found) == ""
    assert saved_state.load(tmp_path) == (found, ())
    assert saved_state.load(tmp_path)[0].id == found.id


def test_a_save_that_succeeds_later_voids_the_mark(tmp_path: Path, disk: FullDisk) -> None:
    for number, full in enumerate((False, True, True, False)):
        disk.is_full = full
        assert bool(write(tmp_path, SavedState(last_s=float(number), id="a"))) is full
    found, problems = saved_state.load(tmp_path)
    assert (found.last_s, found.id, problems) == (3.0, "a", ())


def test_a_first_state_that_could_not_be_saved_is_lost_if_there_was_room_for_the_mark(
    tmp_path: Path, disk: FullDisk
) -> None:
    unsaved.reserve(tmp_path, 0)
    disk.is_full = True
    assert write(tmp_path, SavedState())
    assert saved_state.load(tmp_path)[1] == (
        f"{tmp_path} has no saved state: an earlier agent could not save any",
    )


def test_a_successor_on_a_full_disk_records_that_its_state_is_not_saved(
    tmp_path: Path, disk: FullDisk
) -> None:
    assert write(tmp_path, SavedState(last_s=1.0)) == ""
    before = claim.take(tmp_path)
    disk.is_full = True
    taken = claim.take(tmp_path, answer_s=0.0)
    assert taken.generation == 1
    writer = StateWriter(tmp_path, taken, lambda: None, lambda: None)
    writer.submit(saved_state.encode(SavedState(last_s=2.0)))
    assert writer.finish(PATIENCE_S)
    assert writer.outcome.problem.endswith("No space left on device")
    before.release()
    assert saved_state.load(tmp_path)[1] == (
        f"{tmp_path / 'memory.json'} is out of date: a later state could not be saved",
    )
    disk.is_full = False
    assert write(tmp_path, SavedState(last_s=3.0)) == ""
    assert saved_state.load(tmp_path)[1] == ()


def test_a_mark_that_fails_too_is_told(tmp_path: Path, disk: FullDisk) -> None:
    disk.is_full = True
    assert "nor can this be recorded for the next start" in write(tmp_path, SavedState())


def test_a_mark_of_a_later_generation_holds_after_the_return_to_the_first(tmp_path: Path) -> None:
    for generation in (0, 1):
        saved_state.save(tmp_path, SavedState(last_s=float(generation)), generation)
        unsaved.reserve(tmp_path, generation)
    saved_state.mark_unsaved(tmp_path, 1)
    saved_state.return_to_first_generation(tmp_path)
    found, problems = saved_state.load(tmp_path)
    assert (found.last_s, len(problems)) == (1.0, 1)
