from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from holdfast.snapshot.member_directory import is_abandoned
from supervisor.local.volume import memory_volume


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_volume, "_ROOTS", (tmp_path,))
    return tmp_path


def test_the_folder_of_an_ended_run_is_removed_and_that_of_a_live_one_is_kept(root: Path) -> None:
    dead, owner = memory_volume.create()
    os.close(owner)
    alive, owner = memory_volume.create()
    assert not dead.exists()
    other, others = memory_volume.create()
    assert sorted(root.iterdir()) == sorted((alive, other))
    assert not is_abandoned(alive)
    for each in (owner, others):
        os.close(each)


def test_a_run_that_starts_at_the_same_moment_does_not_count_a_new_folder_as_abandoned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run acts between any two system calls of this one."""
    starts: list[tuple[Path, int]] = []
    within = False

    def other(*_: object) -> None:
        nonlocal within
        if not within:
            within = True
            starts.append(memory_volume.create())
            within = False

    for module, name in ((fcntl, "flock"), (os, "open"), (Path, "mkdir"), (Path, "rename")):
        usual = getattr(module, name)

        def between(*args: object, usual: object = usual, **named: object) -> object:
            other()
            return usual(*args, **named)  # type: ignore[operator]

        monkeypatch.setattr(module, name, between)
    ours, owner = memory_volume.create()
    other()
    monkeypatch.undo()
    assert starts
    assert ours.is_dir()
    assert not is_abandoned(ours)
    assert all(folder.is_dir() for folder, _ in starts)
    assert not list(root.glob(".*")), "a half-made volume is left"
    for each in (owner, *(each for _, each in starts)):
        os.close(each)


def test_incomplete_folders_are_removed_when_they_are_old(root: Path) -> None:
    half = root / f".holdfast-{os.getuid()}-0123"
    half.mkdir()
    _, owner = memory_volume.create()
    assert half.is_dir(), "another process may be creating it"
    os.close(owner)
    os.utime(half, (1.0, 1.0))
    _, owner = memory_volume.create()
    assert not half.exists()
    os.close(owner)
