from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

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


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("has_newest", [True, False])
def test_a_return_that_is_killed_at_any_point_leaves_the_newest_state(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, has_newest: bool
) -> None:
    """Kill it before each change of the folder, start again, and load."""
    replace, unlink = os.replace, Path.unlink
    for kill_at in range(20):
        folder, done = tmp_path_factory.mktemp("state"), 0
        for generation in (0, 1, 2):
            saved_state.save(folder, at(100.0 * generation), generation)
            saved_state.save(folder, at(100.0 * generation + 1), generation)
            (folder / f"lock{f'.{generation}' if generation else ''}").touch()
        if not has_newest:
            (folder / saved_state.names(2)[0]).unlink()

        def step(change: Any, *args: Any, kill_at: int = kill_at, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > kill_at:
                raise Killed
            return change(*args, **options)

        monkeypatch.setattr(os, "replace", partial(step, replace))
        monkeypatch.setattr(Path, "unlink", lambda path, **options: step(unlink, path, **options))
        with suppress(Killed):
            saved_state.return_to_first_generation(folder)
        monkeypatch.undo()
        assert loaded(folder) == 200.0 + has_newest, kill_at
        saved_state.return_to_first_generation(folder)
        assert loaded(folder) == 200.0 + has_newest, kill_at
        if done <= kill_at:
            break
    else:
        pytest.fail("it never ended")
    assert not [each.name for each in folder.iterdir() if each.name.startswith(("memory.1", "memory.2"))]
