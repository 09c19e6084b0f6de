from __future__ import annotations

import os
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


def test_a_fast_local_clock_does_not_turn_files_of_a_live_remote_writer_into_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left(tmp_path, "0000")
    ahead = time.time() + 2 * durable.DEBRIS_AGE_S
    monkeypatch.setattr(time, "time", lambda: ahead)
    durable.remove_debris(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
