from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.fileio import durable


def left(root: Path, host: str) -> Path:
    """Return what a writer on `host` creates; whether that writer is alive cannot be checked."""
    path = root / durable.temporary_path(root, "step").name.replace(durable._HOST, host)
    path.mkdir()
    (path / "data").write_bytes(b"data")
    return path


def test_what_a_writer_elsewhere_has_not_touched_for_long_is_debris(tmp_path: Path) -> None:
    old, new = left(tmp_path, "0000"), left(tmp_path, "0001")
    long_ago = time.time() - durable.DEBRIS_AGE_S - 60
    for path in (old / "data", old):
        os.utime(path, (long_ago, long_ago))
    durable.remove_debris(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_a_clock_of_ours_that_is_ahead_makes_no_debris_of_what_a_writer_elsewhere_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left(tmp_path, "0000")
    ahead = time.time() + 2 * durable.DEBRIS_AGE_S
    monkeypatch.setattr(time, "time", lambda: ahead)
    durable.remove_debris(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
