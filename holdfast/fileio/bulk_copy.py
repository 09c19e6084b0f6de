"""Write a batch of files and make them durable together: concurrent fsyncs take about as long as one.

Files are copied to storage with direct I/O, so that the disk reads the data straight from the source's pages
in memory. Going through the page cache would copy each byte twice and fill memory that the training could
use. It would also stall whenever too many dirty pages pile up, so that one 1 GB write may take four times as
long as another.
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

# The maximum number of open files before a `sync`, because a process may have only a thousand descriptors.
MOST_OPEN = 64
THREADS = 8
PIECE_BYTES = 1 << 20  # the size of a piece of a copy, small enough to stay in a CPU cache
WRITE_BACK_BYTES = 4 << 20
# A copy through the page cache syncs after this many bytes. Otherwise the fsync at the end might take
# minutes.
SYNC_BYTES = 256 << 20
WRITE_BYTES = 8 << 20  # the most that one call writes from memory
HASHED_BYTES = 256 << 10
# A multiple of any page size. Larger pieces would be only slightly faster, and a killed process does not end
# until its current piece is written.
DIRECT_PIECE_BYTES = 8 << 20
BLOCK_BYTES = 4096  # a multiple of any disk's block size
# The errors if the file system does not support direct I/O at all or from such memory, or if the source was
# truncated.
CANNOT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EFAULT})


class FileBatch:
    """A batch of new files. They are durable once `sync` has returned, and closed when the context ends."""

    def __init__(self, moved: Callable[[], object] = lambda: None) -> None:
        """`moved` is called, on any thread, whenever storage accepts a piece or makes a file durable."""
        self._open: list[int] = []
        self._moved = moved

    def copy(self, source: Path | bytes, target: Path) -> FileEntry:
        """Copy `source` to the new file `target`, and return its size and checksums.

        The checksums are computed from a second, concurrent read of the source, so they also reveal errors in
        the copy. At most a few pieces are in memory at a time. Raises OSError.
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
                errno.EIO, f"{os.strerror(errno.EIO)}: its size changed during the copy", os.fspath(source)
            )
        return FileEntry(target.name, size, CHUNK_BYTES, crcs)

    def allocate(self, target: Path, size: int) -> None:
        """Create the file `target` of `size` bytes, which other code fills before `sync`. Raises OSError."""
        os.ftruncate(self._create(target), size)

    def write(self, target: Path, content: bytes, mode: int = 0o666) -> None:
        """Write the new file `target`, with the permissions `mode` minus the umask. Raises OSError."""
        _write_all(self._create(target, mode), memoryview(content), self._moved)

    def add_directory(self, path: Path) -> None:
        """Add a directory whose entries `sync` also makes durable. Raises OSError."""
        self._open.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def sync(self) -> None:
        """Wait until all files are durable. Raises OSError if any of them could not be made durable."""
        threads = min(THREADS, len(self._open))
        try:
            # Small files are written in a recovery, and starting a thread takes a millisecond.
            if threads == 1:
                self._sync(self._open[0])
            if threads < 2:
                return
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
            self.sync()
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
    """Copy `file`, using direct I/O where possible, and return the number of bytes copied."""
    at = begun = synced = copy_direct(file, out, moved)
    file.seek(at)
    os.lseek(out, at, os.SEEK_SET)
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))  # unlike the heap, returned to the system afterwards
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
    """Start writing to the disk now rather than at the fsync."""
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
    """Copy the beginning of `file` into the new file `out`, and return how many bytes were copied.

    Only whole blocks are copied. If the file system does not support direct I/O, fewer blocks or none are
    copied. The caller must copy the remainder through the page cache. The data is durable only after an
    fsync. `moved` is called for each piece. Raises OSError.
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
        if error.errno not in CANNOT:
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
    """Write one piece; return how many bytes of it were written, in whole blocks."""
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
                    break  # the file system is full; the write through the page cache will raise that error
    except ValueError:  # the source was truncated in the meantime
        pass
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    return count
