from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.fileio import bulk_copy
from holdfast.fileio.bulk_copy import BLOCK_BYTES, FileBatch
from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry, chunk_crcs

PIECE_BYTES = 1 << 18
CONTENT = random.Random(5).randbytes(3 * PIECE_BYTES + 2 * BLOCK_BYTES + 77)
WHOLE_BLOCKS = len(CONTENT) - 77
Write = Callable[[int, memoryview, int], int]
write: Write = os.pwrite


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_copy, "DIRECT_PIECE_BYTES", PIECE_BYTES)


def copied(folder: Path, content: bytes = CONTENT) -> int:
    """Copy with direct writes only, check the copied part, and return its length."""
    (folder / "source").write_bytes(content)
    with open(folder / "source", "rb", buffering=0) as file, open(folder / "copy", "wb", buffering=0) as out:
        count = bulk_copy.copy_direct(file, out.fileno())
        assert not fcntl.fcntl(out, fcntl.F_GETFL) & os.O_DIRECT
    assert (folder / "copy").read_bytes()[:count] == content[:count]
    return count


def made_durable(folder: Path) -> FileEntry:
    (folder / "source").write_bytes(CONTENT)
    (folder / "target").unlink(missing_ok=True)
    with FileBatch() as batch:
        entry = batch.copy(folder / "source", folder / "target")
        batch.sync()
    assert (folder / "target").read_bytes() == CONTENT
    return entry


def able(folder: Path) -> bool:
    with open(folder / "probe", "wb") as file:
        return bulk_copy._switched(file.fileno(), os.O_DIRECT)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        PIECE_BYTES - 1,
        PIECE_BYTES,
        PIECE_BYTES + BLOCK_BYTES + 1,
        700_000,
    ],
)
def test_whole_blocks_bypass_the_cache_and_the_rest_remains(size: int, tmp_path: Path) -> None:
    assert copied(tmp_path, CONTENT[:size]) == (size // BLOCK_BYTES * BLOCK_BYTES if able(tmp_path) else 0)


def test_every_piece_is_written_from_the_source_pages_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not able(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    seen: list[tuple[bool, int]] = []

    def spied(out: int, piece: memoryview, at: int) -> int:
        seen.append((bool(fcntl.fcntl(out, fcntl.F_GETFL) & os.O_DIRECT), len(piece)))
        return write(out, piece, at)

    monkeypatch.setattr(os, "pwrite", spied)
    made_durable(tmp_path)
    assert seen == [(True, PIECE_BYTES)] * 3 + [(True, 2 * BLOCK_BYTES)]


def failing(at_call: int, found: int | OSError) -> Write:
    """Return a write function that, at one call, writes only a part or fails."""
    calls = iter(range(1 << 30))

    def wrong(out: int, piece: memoryview, at: int) -> int:
        if next(calls) != at_call:
            return write(out, piece, at)
        if isinstance(found, OSError):
            raise found
        return write(out, piece[:found], at)

    return wrong


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
@pytest.mark.parametrize("at_call", [0, 2])
def test_where_direct_writes_are_impossible_the_ordinary_copy_is_used(
    code: int, at_call: int, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not able(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(os, "pwrite", failing(at_call, OSError(code, os.strerror(code))))
    assert copied(tmp_path) == at_call * PIECE_BYTES
    monkeypatch.setattr(os, "pwrite", failing(at_call, OSError(code, os.strerror(code))))
    assert made_durable(tmp_path).crc32 == chunk_crcs(memoryview(CONTENT))


def test_a_file_system_that_refuses_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refused(out: int, what: int, value: int = 0) -> int:
        if what == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(out, what, value)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    assert copied(tmp_path) == 0
    assert made_durable(tmp_path) == FileEntry(
        "target", len(CONTENT), CHUNK_BYTES, chunk_crcs(memoryview(CONTENT))
    )


@pytest.mark.parametrize(
    ("written", "copied_bytes"),
    [(0, PIECE_BYTES), (2 * BLOCK_BYTES, WHOLE_BLOCKS), (BLOCK_BYTES + 5, PIECE_BYTES + BLOCK_BYTES)],
)
def test_a_partial_write_is_continued(
    written: int, copied_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not able(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(bulk_copy, "_switched", lambda *_: True)  # without it, odd sizes are not refused
    monkeypatch.setattr(os, "pwrite", failing(1, written))
    assert copied(tmp_path) == copied_bytes
    monkeypatch.setattr(os, "pwrite", failing(1, written))
    made_durable(tmp_path)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not able(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(os, "pwrite", failing(2, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        copied(tmp_path)


def test_a_source_that_becomes_shorter_ends_the_copy_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not able(tmp_path):
        pytest.skip("this file system has no O_DIRECT")

    def cut(out: int, piece: memoryview, at: int) -> int:
        os.truncate(tmp_path / "source", PIECE_BYTES + 100)
        return write(out, piece, at)

    monkeypatch.setattr(os, "pwrite", cut)
    assert copied(tmp_path) in (PIECE_BYTES, 0)
