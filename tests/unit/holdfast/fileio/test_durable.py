from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.fileio import durable


def left(root: Path, host: str) -> Path:
    """Return a file as a writer on `host` creates it. Nobody here can check whether that writer is alive."""
    path = root / durable.temporary_path(root, "step").name.replace(durable._HOST, host)
    path.mkdir()
    (path / "data").write_bytes(b"data")
    return path


def test_old_files_of_a_writer_on_another_host_are_debris(tmp_path: Path) -> None:
    old, new = left(tmp_path, "0000"), left(tmp_path, "0001")
    long_ago = time.time() - durable.DEBRIS_AGE_S - 60
    for path in (old / "data", old):
        os.utime(path, (long_ago, long_ago))
    durable.remove_debris(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_a_process_with_the_host_and_the_number_of_a_dead_one_uses_other_names() -> None:
    program = "from holdfast.fileio import durable; print(next(durable._numbers))"
    numbers = [subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)]
    assert numbers[0] != numbers[1]


def test_in_a_directory_of_its_own_a_process_removes_every_temporary_file(tmp_path: Path) -> None:
    left(tmp_path, "0000")
    durable.temporary_path(tmp_path, "step").write_text("cut off")
    (tmp_path / "step").write_text("whole")
    durable.remove_debris(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "the writers may be alive"
    durable.remove_debris(tmp_path, owned=True)
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


def test_a_fast_local_clock_does_not_turn_files_of_a_live_remote_writer_into_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left(tmp_path, "0000")
    ahead = time.time() + 2 * durable.DEBRIS_AGE_S
    monkeypatch.setattr(time, "time", lambda: ahead)
    durable.remove_debris(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_one_small_file_is_made_durable_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a recovery, each order writes such a file, and on a busy machine a thread starts only after 1 ms."""
    synced: list[int] = []
    monkeypatch.setattr("holdfast.fileio.bulk_copy.ThreadPoolExecutor", None)
    monkeypatch.setattr("os.fsync", synced.append)
    durable.replace_file(tmp_path / "order", b"new")
    assert (tmp_path / "order").read_bytes() == b"new"
    assert len(synced) == 2  # the file and its directory
