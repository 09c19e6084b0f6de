from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.fileio import range_writer
from holdfast.fileio.bulk_copy import BLOCK_BYTES
from holdfast.fileio.durable import is_temporary_name, temporary_path
from holdfast.fileio.range_writer import RangeWriter

SIZE = 10 * BLOCK_BYTES + 17


@contextmanager
def opened(folder: Path, name: str = "file") -> Iterator[RangeWriter]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with RangeWriter(name, descriptor) as found:
            yield found
    finally:
        os.close(descriptor)


@contextmanager
def aligned(content: bytes) -> Iterator[memoryview]:
    with mmap.mmap(-1, len(content)) as memory, memoryview(memory) as view:
        view[:] = content
        yield view


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", SIZE)
    return tmp_path


@pytest.mark.parametrize("at", [0, BLOCK_BYTES, 3])
@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_range_is_written_and_nothing_else(
    folder: Path, at: int, size: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct:
        monkeypatch.setattr(range_writer, "_opened_direct", lambda *_: -1)
    content = random.Random(size).randbytes(size)
    with opened(folder) as file, aligned(content or b" ") as view:
        assert file.size == SIZE
        assert is_direct or not file.is_direct
        file.write(view[:size], at)
        file.sync()
    expected = bytes(at) + content
    assert (folder / "file").read_bytes() == expected + bytes(SIZE - len(expected))


def test_memory_that_direct_io_cannot_use_is_written_all_the_same(folder: Path) -> None:
    content = random.Random(1).randbytes(2 * BLOCK_BYTES + 1)
    with opened(folder) as file:
        file.write(memoryview(content)[1:], 0)
    assert (folder / "file").read_bytes()[: 2 * BLOCK_BYTES] == content[1:]


def test_a_file_is_never_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_a_plain_file_is_opened(tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "target").touch()
        (tmp_path / "file").symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(tmp_path / "file")
    else:
        (tmp_path / "file").mkdir()
    with pytest.raises(OSError) as raised, opened(tmp_path):  # noqa: PT011
        pass
    assert raised.value.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EINVAL)


def test_names_that_a_writer_gives_are_known(tmp_path: Path) -> None:
    name = temporary_path(tmp_path, "step-00000007").name
    assert is_temporary_name(name, "step-00000007")
    assert not is_temporary_name(name, "step-00000008")
    for wrong in ("", "..", "step-00000007", f"a/{name}", f"../{name}", f"{name}/", f"{name}\n", f"{name}\0"):
        assert not is_temporary_name(wrong, "step-00000007")
