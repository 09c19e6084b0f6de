from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.catalog import verify
from holdfast.checkpoint.writer import write
from holdfast.fileio import bulk_copy
from tests.samples.checkpoints import PRIVATE, STATE, assert_whole, latest, names, save, scan
from tests.sandbox import in_child, limit_file_size


def write_files(root: Path, files: dict[str, Path | bytes], step: int = 1) -> Path:
    return write(root, generation=1, step=step, world_size=1, files=files, meta={}, created_at=0)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path / "root", 1)
    huge = tmp_path / "huge"
    status = os.statvfs(tmp_path)
    huge.touch()
    os.truncate(huge, min(status.f_blocks * status.f_frsize + 1, 2**43))
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_files(tmp_path / "root", {"state": huge}, 2)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path / "root") == {"latest", "step-00000001"}


@pytest.mark.parametrize("limit_bytes", [0, 10, 2000, 3000])
@pytest.mark.parametrize("step", [1, 2])
def test_a_failed_write_leaves_no_debris_and_keeps_the_previous_checkpoint(
    memory: Path, step: int, limit_bytes: int
) -> None:
    save(memory, 1)

    def child() -> None:
        limit_file_size(limit_bytes)
        with pytest.raises(OSError, match="large"):
            save(memory, step, generation=2, more={"more": bytes(4000)})

    assert in_child(child) == 0
    assert names(memory) == {"latest", "step-00000001"}
    assert_whole(scan(memory)[0])
    save(memory, step, generation=2)
    assert scan(memory)[0].generation == 2


class Disk:
    """Records in order which files become durable and which get their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: str = "nothing") -> None:
        self.seen: list[str] = []
        self._broken, self._fsync, rename = broken, os.fsync, Path.rename
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(Path, "rename", lambda old, new: self.name(rename, old, new))
        monkeypatch.setattr(os, "replace", partial(self.name, os.replace))

    def fsync(self, descriptor: int) -> None:
        found = Path(f"/proc/self/fd/{descriptor}").readlink().name
        name = re.sub(r"\.tmp-[A-Za-z0-9_]+-\d+-\d+-", "", found)
        if name == self._broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(descriptor)
        self.seen.append(name)

    def name(self, give: Callable[[Path, Path], object], old: Path, new: Path) -> None:
        self.seen.append(f"name {new.name}")
        give(old, new)


@pytest.mark.parametrize("most", [1, 3, 64])
def test_all_files_are_durable_before_the_name_exists(
    memory: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(bulk_copy, "MOST_OPEN", most)
    save(memory, 1)
    disk = Disk(monkeypatch)
    save(memory, 2)
    at = disk.seen.index("name step-00000002")
    assert sorted(disk.seen[:at]) == sorted([STATE, PRIVATE, "manifest.json", "step-00000002", "latest"])
    assert disk.seen[at:] == ["name step-00000002", "name latest", memory.name]


@pytest.mark.parametrize("broken", [STATE, PRIVATE, "manifest.json", "step-00000002", "latest"])
def test_a_checkpoint_that_cannot_be_made_durable_gets_no_name(
    memory: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    save(memory, 1)
    with monkeypatch.context() as context:
        Disk(context, broken)
        with pytest.raises(OSError, match="Input/output error"):
            save(memory, 2)
    assert names(memory) == {"latest", "step-00000001"}
    assert latest(memory) == "step-00000001"
    assert_whole(scan(memory)[0])


@pytest.mark.parametrize("limit_bytes", [0, 1000, bulk_copy.PIECE_BYTES + 10])
def test_a_copy_that_fails_half_way_reports_the_reason(memory: Path, limit_bytes: int) -> None:
    source = memory / "source"
    source.write_bytes(bytes(2 * bulk_copy.PIECE_BYTES))

    def child() -> None:
        limit_file_size(limit_bytes)
        with pytest.raises(OSError, match="large"):
            write_files(memory / "root", {"a": source}, 1)

    assert in_child(child) == 0
    assert names(memory / "root") == set()


def test_a_source_that_changes_during_the_copy_is_an_error(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memory / "source"
    source.write_bytes(bytes(bulk_copy.PIECE_BYTES))
    read = bulk_copy._copied

    def growing(*files: Any) -> int:
        read(*files)
        source.write_bytes(bytes(bulk_copy.PIECE_BYTES + 1))
        return read(*files)

    monkeypatch.setattr(bulk_copy, "_copied", growing)
    monkeypatch.setattr(bulk_copy, "_crcs", lambda descriptor: (bulk_copy.PIECE_BYTES, (0,)))
    with pytest.raises(OSError, match="its size changed during the copy"), bulk_copy.FileBatch() as batch:
        batch.copy(source, memory / "target")


@pytest.mark.parametrize("past_the_cache", [True, False])
def test_the_caller_is_notified_of_each_piece_that_storage_takes(
    past_the_cache: bool, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memory / "source"
    source.write_bytes(bytes(3 << 20))
    if not past_the_cache:
        monkeypatch.setattr(bulk_copy, "_switched", lambda *_: False)
    monkeypatch.setattr(bulk_copy, "DIRECT_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(bulk_copy, "SYNC_BYTES", 1 << 20)
    monkeypatch.setattr(bulk_copy, "WRITE_BYTES", 1 << 20)
    heard = list[None]()
    with bulk_copy.FileBatch(lambda: heard.append(None)) as batch:
        batch.copy(source, tmp_path / "target")
        assert len(heard) == 3
        batch.copy(bytes(2 << 20), tmp_path / "other")
        assert len(heard) == 5
        batch.sync()
        assert len(heard) == 7
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("past_the_cache", [True, False])
def test_errors_in_the_copy_are_detected_by_the_checksums(
    past_the_cache: bool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memory / "source"
    source.write_bytes(random.Random(1).randbytes(3 * bulk_copy.PIECE_BYTES))
    written, pwrite = bulk_copy._write_all, os.pwrite

    def wrong(descriptor: int, content: memoryview, moved: Callable[[], object]) -> None:
        written(descriptor, memoryview(bytes(len(content)) if len(content) > 1000 else content), moved)

    if past_the_cache:
        monkeypatch.setattr(bulk_copy, "_switched", lambda *_: True)
        monkeypatch.setattr(os, "pwrite", lambda out, piece, at: pwrite(out, bytes(len(piece)), at))
    else:
        monkeypatch.setattr(bulk_copy, "_switched", lambda *_: False)
        monkeypatch.setattr(bulk_copy, "_write_all", wrong)
    write_files(memory / "root", {"a": source}, 1)
    (found,) = scan(memory / "root")
    assert verify(found) is not None


def test_no_file_remains_open(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(tuple(Path("/proc/self/fd").iterdir()))
    save(memory, 1)
    Disk(monkeypatch, "manifest.json")
    with pytest.raises(OSError, match="Input/output error"):
        save(memory, 2)
    assert len(tuple(Path("/proc/self/fd").iterdir())) == before


def test_a_source_that_cannot_be_read_leaves_no_debris(memory: Path) -> None:
    save(memory, 1)
    with pytest.raises(OSError, match="Input/output error") as caught:  # address 0 is never mapped
        write_files(memory, {"a": b"a", "state": Path("/proc/self/mem")}, 2)
    assert caught.value.errno == errno.EIO
    assert names(memory) == {"latest", "step-00000001"}
