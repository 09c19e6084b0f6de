"""New files that become durable together: a disk takes many fsyncs at once in about the time of one.

A file is copied to storage past the page cache, straight from the pages that it lies in. A copy through the
cache moves each byte once more, fills memory that the training could use, and comes to a stop whenever the
kernel finds too much of it unwritten: of two writes of 1 GB one may take four times as long as the other.
Past the cache the disk fetches what is written from the source's own memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path

from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry, RunningChecksum, chunk_crcs

MOST_OPEN = 64  # files that wait for `settle`: a process may have a thousand, and others need some
THREADS = 8
PIECE_BYTES = 1 << 20  # of a copy: stays in a cache
WRITE_BACK_BYTES = 4 << 20
SYNC_BYTES = 256 << 20  # of a copy through the cache: else all of it could be left for one fsync of minutes
WRITE_BYTES = 8 << 20  # in one call, of what is written from memory
HASHED_BYTES = 256 << 10
# Larger pieces are little faster, and a kill waits for one; a multiple of any page.
DIRECT_PIECE_BYTES = 8 << 20
BLOCK_BYTES = 4096  # a multiple of any disk's block
# What a file system says that cannot do it, or not from such memory, and a source that became shorter.
_CANNOT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EFAULT})


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
    at = begun = synced = copy_direct(file, out, moved)
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
    running, at = RunningChecksum(), 0
    piece = memoryview(mmap.mmap(-1, HASHED_BYTES))
    while count := os.preadv(descriptor, [piece], at):
        running.update(piece[:count])
        at += count
    return at, running.crcs()


def _write_all(descriptor: int, content: memoryview, moved: Callable[[], object]) -> None:
    while content:
        content = content[os.write(descriptor, content[:WRITE_BYTES]) :]
        moved()


def copy_direct(file: FileIO, out: int, moved: Callable[[], object] = lambda: None) -> int:
    """Copy `file` into the new file `out` from the beginning on, and return how many bytes were copied.

    They are whole blocks. Where the file system cannot do it they are fewer, or none: what is left is the
    caller's to copy in the usual way. Nothing is durable before an fsync. `moved` is called for each piece.
    Raises OSError.
    """
    if not _switched(out, os.O_DIRECT):
        return 0
    try:
        return _pieces(file.fileno(), out, moved)
    finally:
        _switched(out, 0)


def _switched(out: int, direct: int) -> bool:
    flags = fcntl.fcntl(out, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(out, fcntl.F_SETFL, flags | direct)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _pieces(source: int, out: int, moved: Callable[[], object]) -> int:
    size = os.fstat(source).st_size // BLOCK_BYTES * BLOCK_BYTES
    done = 0
    while done < size:
        length = min(DIRECT_PIECE_BYTES, size - done)
        count = _piece(source, out, done, length)
        done += count
        moved()
        if count < length:
            break
    return done


def _piece(source: int, out: int, at: int, length: int) -> int:
    """Write one piece; return how many bytes of it went, in whole blocks."""
    count = 0
    try:
        with (
            mmap.mmap(source, length, access=mmap.ACCESS_READ, offset=at) as piece,
            memoryview(piece) as view,
        ):
            while count < length:
                with view[count:] as rest:
                    written = os.pwrite(out, rest, at + count)
                count += written // BLOCK_BYTES * BLOCK_BYTES
                if written % BLOCK_BYTES or not written:
                    break  # there is no room for more: the usual way ends with that error
    except ValueError:  # shorter than a moment ago
        pass
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    return count
