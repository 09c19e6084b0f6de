"""A file that is polled more often than it is written is read once per write."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.store import json_file
from supervisor.store.json_file import JsonFileReader


def test_an_unchanged_file_is_parsed_once_and_a_replaced_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads, read = tmp_path / "status.json", [], json_file.read

    def counting(at: Path) -> dict[str, object] | None:
        reads.append(at)
        return read(at)

    monkeypatch.setattr(json_file, "read", counting)
    follower = JsonFileReader(path)
    assert follower.read() is None
    for step in (1, 2):
        json_file.replace(path, {"step": step}, sync=False)
        assert [follower.read() for _ in range(3)] == [{"step": step}] * 3
    assert len(reads) == 3
    path.unlink()
    assert follower.read() is None
    json_file.replace(path, {"step": 3}, sync=False)
    assert follower.read() == {"step": 3}
