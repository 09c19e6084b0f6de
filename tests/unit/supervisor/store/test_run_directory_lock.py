from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from supervisor.store import run_directory


def test_one_process_holds_the_lock_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LOCK_S", 0.0)
    path = tmp_path / "lock"
    assert not run_directory.is_held(path)
    first = run_directory.lock(path)
    assert first >= 0
    assert not os.get_inheritable(first)
    assert run_directory.is_held(path)
    assert run_directory.lock(path) == -1
    assert run_directory.lock_holder(path) == os.getpid()
    os.close(first)
    assert not run_directory.is_held(path)
    os.close(run_directory.lock(path))


def test_a_simultaneous_reader_does_not_prevent_locking(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    os.close(run_directory.lock(path))
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        os.close(reader)

    reader = os.open(path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("supervisor.store.run_directory.time.sleep", sleep)
        os.close(run_directory.lock(path))
    assert looks == 1


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        run_directory.lock(tmp_path / "lock")
    assert not (tmp_path / "victim").exists()
