"""New files that become durable together: a disk takes many fsyncs at once in about the time of one."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path

from holdfast import direct
from holdfast.checksum import CHUNK_BYTES, Running, chunk_crcs
from holdfast.manifest import FileEntry

MOST_OPEN = 64  # files that wait for `settle`: a process may have a thousand, and others need some
THREADS = 8
PIECE_BYTES = 1 << 20  # of a copy: stays in a cache
WRITE_BACK_BYTES = 4 << 20
SYNC_BYTES = 256 << 20  # of a copy through the cache: else all of it could be left for one fsync of minutes
WRITE_BYTES = 8 << 20  # in one call, of what is written from memory
HASHED_BYTES = 256 << 10


class FileBatch:
    """Files that are written, and durable once `settle` has returned. As a context manager it closes them."""

    def __init__(self, moved: Callable[[], object] = lambda: None) -> None:
        """`moved` is called, by any thread, whenever storage has taken a piece or made a file durable."""
        self._open: list[int] = []
        self._moved = moved

    def copy(self, source: Path | bytes, target: Path) -> FileEntry:
        """Write `source` to the new file `target`, and return its size and checksums.

        The checksums are of the source, read a second time beside the copy: they find what goes wrong in it,
        too. Memory is bounded by a few pieces. Raises OSError.
        """
        out = self._create(target)
        if isinstance(source, bytes):
            _write_all(out, memoryview(source), self._moved)
            return FileEntry(target.name, len(source), CHUNK_BYTES, chunk_crcs(memoryview(source)))
        with open(source, "rb", buffering=0) as file, ThreadPoolExecutor(1, "holdfast-checksum") as pool:
            hashing = pool.submit(_crcs, file.fileno())
            size = _copied(file, out, self._moved)
            hashed, crcs = hashing.result()
        if hashed != size:
            raise OSError(
                errno.EIO, f"{os.strerror(errno.EIO)}: its size changed under way", os.fspath(source)
            )
        return FileEntry(target.name, size, CHUNK_BYTES, crcs)

    def write(self, target: Path, content: bytes, mode: int = 0o666) -> None:
        """Write the new file `target`, with the permissions `mode` less the umask. Raises OSError."""
        _write_all(self._create(target, mode), memoryview(content), self._moved)

    def add_directory(self, path: Path) -> None:
        """Make the names in a directory durable, too. Raises OSError."""
        self._open.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def settle(self) -> None:
        """Return once all is durable. Raises OSError when one is not."""
        threads = min(THREADS, max(1, len(self._open)))
        try:
            with ThreadPoolExecutor(threads, "holdfast-fsync") as pool:
                for done in [pool.submit(self._sync, each) for each in self._open]:
                    done.result()
        finally:
            self._close()

    def __enter__(self) -> FileBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _create(self, target: Path, mode: int = 0o666) -> int:
        if len(self._open) >= MOST_OPEN:
            self.settle()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._open.append(os.open(target, flags, mode))
        return self._open[-1]

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self._moved()

    def _close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def _copied(file: FileIO, out: int, moved: Callable[[], object]) -> int:
    """Copy `file`, and return how many bytes that were: past the cache, but for what cannot go that way."""
    at = begun = synced = direct.copy(file, out, moved)
    file.seek(at)
    os.lseek(out, at, os.SEEK_SET)
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))  # a heap would keep it
    while count := file.readinto(piece):
        _write_all(out, piece[:count], moved)
        at += count
        if at - synced >= SYNC_BYTES:
            os.fdatasync(out)
            synced = at
        if at - begun >= WRITE_BACK_BYTES:
            _write_back(out, begun, at)
            begun = at
    _write_back(out, begun, at)
    return at


def _write_back(out: int, begin: int, end: int) -> None:
    """Let the disk begin with what is written, instead of at fsync."""
    with suppress(OSError):
        os.posix_fadvise(out, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _crcs(descriptor: int) -> tuple[int, tuple[int, ...]]:
    """Return the size of a file, and the CRC32 of each chunk."""
    running, at = Running(), 0
    piece = memoryview(mmap.mmap(-1, HASHED_BYTES))
    while count := os.preadv(descriptor, [piece], at):
        running.update(piece[:count])
        at += count
    return at, running.crcs()


def _write_all(descriptor: int, content: memoryview, moved: Callable[[], object]) -> None:
    while content:
        content = content[os.write(descriptor, content[:WRITE_BYTES]) :]
        moved()
