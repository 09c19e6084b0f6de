from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.fileio import durable
from nodeagent.agent import claim, saved_state
from nodeagent.agent.claim import FolderInUse
from nodeagent.agent.saved_state import SavedState

NO_TIME_S = 0.0


def at(last_s: float) -> SavedState:
    return SavedState(last_s=last_s)


def loaded(folder: Path) -> float:
    found, problems = saved_state.load(folder)
    assert problems == ()
    return found.last_s


def test_an_owner_that_answers_keeps_the_folder(tmp_path: Path) -> None:
    owner = claim.take(tmp_path)
    with pytest.raises(FolderInUse, match=f"in use by another agent, process {os.getpid()}"):
        claim.take(tmp_path, 60.0, wait=lambda _: owner.answer())
    assert not owner.is_superseded()
    owner.release()
    assert claim.take(tmp_path).generation == 0


def test_an_owner_that_does_not_answer_is_fenced_by_the_next_generation(tmp_path: Path) -> None:
    stopped = claim.take(tmp_path)
    saved_state.save(tmp_path, at(1.0), stopped.generation)
    successor = claim.take(tmp_path, NO_TIME_S)
    assert (successor.generation, successor.took_over) == (1, str(os.getpid()))
    assert stopped.is_superseded()
    assert loaded(tmp_path) == 1.0, "the successor continues from its predecessor's state"
    saved_state.save(tmp_path, at(2.0), successor.generation)
    saved_state.save(tmp_path, at(1.5), stopped.generation)  # it was in this call when it was taken over
    assert loaded(tmp_path) == 2.0
    third = claim.take(tmp_path, NO_TIME_S)
    assert (third.generation, successor.is_superseded()) == (2, True)


def test_an_owner_removes_the_temporary_files_of_a_killed_one_and_can_save(tmp_path: Path) -> None:
    saved_state.save(tmp_path, at(1.0))
    for name in (*saved_state.names(0), "policy.last-good.toml"):
        durable.temporary_path(tmp_path, name).write_text("cut off")  # by this process: in a new container
    owner = claim.take(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [claim.LOCK, saved_state.NAME]
    saved_state.save(tmp_path, at(2.0), owner.generation)
    assert loaded(tmp_path) == 2.0


def test_only_one_successor_takes_over(tmp_path: Path) -> None:
    claim.take(tmp_path)
    faster: list[claim.Claim] = []

    def another(_: float) -> None:
        if not faster:
            faster.append(claim.take(tmp_path, NO_TIME_S))

    with pytest.raises(FolderInUse):
        claim.take(tmp_path, 0.05, wait=another)
    assert faster[0].generation == 1
    assert not faster[0].is_superseded()


def test_the_first_generation_returns_once_all_former_owners_have_ended(tmp_path: Path) -> None:
    stopped = claim.take(tmp_path)
    saved_state.save(tmp_path, at(1.0), 0)
    second = claim.take(tmp_path, NO_TIME_S)
    saved_state.save(tmp_path, at(2.0), 1)
    saved_state.save(tmp_path, at(3.0), 1)
    second.release()
    again = claim.take(tmp_path, NO_TIME_S)
    assert again.generation == 1, "the first owner has not ended"
    again.release()
    third = claim.take(tmp_path, NO_TIME_S)
    third.release()
    stopped.release()
    last = claim.take(tmp_path, NO_TIME_S)
    assert last.generation == 0
    assert loaded(tmp_path) == 3.0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lock", "memory.before.json", "memory.json"]


def test_a_successor_that_ended_before_it_saved_loses_nothing(tmp_path: Path) -> None:
    stopped = claim.take(tmp_path)
    saved_state.save(tmp_path, at(1.0), 0)
    second = claim.take(tmp_path, NO_TIME_S)
    saved_state.save(tmp_path, at(2.0), 1)
    third = claim.take(tmp_path, NO_TIME_S)
    for each in (stopped, second, third):
        each.release()
    assert claim.take(tmp_path).generation == 0
    assert loaded(tmp_path) == 2.0


def test_agents_that_start_together_do_not_both_own_the_folder(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    owners: list[claim.Claim] = []
    refused: list[FolderInUse] = []

    def answer(_: float) -> None:
        for each in tuple(owners):
            each.answer()

    def begin() -> None:
        start.wait(20.0)
        try:
            owners.append(claim.take(tmp_path, 60.0, wait=answer))
        except FolderInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=begin, daemon=True) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30.0)
    assert (len(owners), len(refused)) == (1, 7)


def test_an_owner_that_ends_while_a_successor_waits_is_not_taken_over(tmp_path: Path) -> None:
    owner = claim.take(tmp_path)
    ended: list[None] = []

    def end(_: float) -> None:
        if not ended:
            ended.append(owner.release())  # type: ignore[func-returns-value]

    found = claim.take(tmp_path, 60.0, wait=end)
    assert (found.generation, found.took_over) == (0, "")
