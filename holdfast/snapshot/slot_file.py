"""One slot file of an arena: its lock, its memory, its mapping.

A process that touches the content holds the file's flock: exclusive to write, shared to read. A lock ends
with its process, so a dead writer never blocks, and no process shrinks a file under a reader (that would be a
SIGBUS).

A forked child (a DataLoader worker) would share the open file and with it the lock, and keep it after the
holder's death. So a child closes what its parent had locked, and mappings, which have a descriptor of their
own that no code can close, are of the file opened a second time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from pathlib import Path

from holdfast.snapshot.tensor_copy import address_of, populate

BLOCK_BYTES = 512  # the unit of st_blocks


class Slot:
    """The writing end of a slot. Of all threads and processes one at a time can hold it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._opened_by = -1
        self._held = threading.Lock()  # flock does not part threads that share a descriptor
        self._mapping: mmap.mmap | None = None
        self._data: memoryview | None = None
        self._backed = False
        _slots.add(self)

    def acquire(self) -> bool:
        """Take the exclusive lock; False at once if a reader or another writer holds it."""
        if not self._held.acquire(blocking=False):
            return False
        try:
            self._open()
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held.release()
            return False
        except BaseException:
            self._held.release()
            raise
        return True

    def release(self) -> None:
        """Give the lock back."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._held.release()

    def fit(self, total_bytes: int) -> mmap.mmap:
        """Return a mapping of exactly `total_bytes`, all of it backed by memory.

        Costs one system call when the size is what it was. Needs the lock.

        Raises:
            OSError: No room (ENOSPC), here and never as a SIGBUS later; the content is undefined.
        """
        status = os.fstat(self._descriptor)
        if status.st_size != total_bytes or status.st_blocks * BLOCK_BYTES < total_bytes:
            if status.st_size != total_bytes:
                self._unmap()
            if status.st_size > total_bytes:
                os.ftruncate(self._descriptor, total_bytes)
            # Extends and backs in one step: a kill in between leaves no sparse file of full size.
            os.posix_fallocate(self._descriptor, 0, total_bytes)
        if self._mapping is None or len(self._mapping) != total_bytes:
            self._unmap()
            self._mapping = _map(self._descriptor, total_bytes)
        return self._mapping

    def stretch(self, total_bytes: int) -> mmap.mmap:
        """Return a mapping of exactly `total_bytes`, not yet backed by memory: see `back`. Needs the lock.

        A kill leaves a file with holes, which has no record and which `fit` fills.
        """
        status = os.fstat(self._descriptor)
        self._backed = status.st_size == total_bytes and status.st_blocks * BLOCK_BYTES >= total_bytes
        if status.st_size != total_bytes:
            self._unmap()
            os.ftruncate(self._descriptor, total_bytes)
        if not self._backed:
            room = os.fstatvfs(self._descriptor)
            if total_bytes - status.st_blocks * BLOCK_BYTES > room.f_bavail * room.f_frsize:
                raise OSError(errno.ENOSPC, f"no room for a snapshot of {total_bytes} bytes", str(self._path))
        if self._mapping is None or len(self._mapping) != total_bytes:
            self._unmap()
            self._mapping = _map(self._descriptor, total_bytes)
        return self._mapping

    def back(self, begin: int, end: int) -> None:
        """Back a range with memory before it is written to. Needs the lock; several threads may do so.

        Raises:
            OSError: No room (ENOSPC), here and never as a SIGBUS later.
        """
        if not self._backed:
            os.posix_fallocate(self._descriptor, begin, end - begin)
        if self._mapping is not None:
            populate(address_of(self._mapping) + begin, end - begin)

    def whole(self, total_bytes: int) -> mmap.mmap | None:
        """Return a mapping of the file as it is, for the next `fit`; None if that would have to change it.

        Needs no lock, for nothing is read or written. Not beside another thread that uses this slot.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        if status.st_size != total_bytes or status.st_blocks * BLOCK_BYTES < total_bytes:
            return None
        self._open()
        if os.fstat(self._descriptor).st_size != total_bytes:  # changed meanwhile
            return None
        if self._mapping is None or len(self._mapping) != total_bytes:
            self._unmap()
            self._mapping = _map(self._descriptor, total_bytes)
        return self._mapping

    def put_header(self, header: bytes) -> memoryview:
        """Write `header` unless it is there already; return the data area behind it.

        The view is the same object as long as mapping and header size stay. Needs the lock and
        a mapping from `fit`.
        """
        mapping = self._mapping
        assert mapping is not None
        if mapping[: len(header)] != header:
            mapping[: len(header)] = header
        if self._data is None or len(self._data) != len(mapping) - len(header):
            self._data = memoryview(mapping)[len(header) :]
        return self._data

    def size_bytes(self) -> int:
        """Return the size of the file. Needs no lock. Raises OSError, as when there is none."""
        if self._is_open():
            status = os.fstat(self._descriptor)  # half of what a look along the path costs
            if status.st_nlink:
                return status.st_size
        return os.stat(self._path).st_size  # noqa: PTH116  # in every snapshot

    def close(self) -> None:
        """Drop mapping and descriptor. A view that the caller still holds stays mapped."""
        self._unmap()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        if self._is_open() and self._is_found():
            return
        self.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._opened_by = os.getpid()

    def _is_found(self) -> bool:
        """False when the file was deleted: it is nobody's. One that was put back has a link, and no name."""
        ours = os.fstat(self._descriptor)
        if ours.st_nlink:
            return True
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    def _is_open(self) -> bool:
        """Say whether this process opened the file: after a fork the lock would be the parent's as well."""
        return self._descriptor >= 0 and self._opened_by == os.getpid()

    def let_go(self) -> None:
        """In a forked child: close what the parent has locked; its lock is the parent's alone then."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._held = threading.Lock()

    def _unmap(self) -> None:
        # Not closed: tensors over the old mapping may live on, and keep it until they die.
        self._data = None
        self._mapping = None


def lock_shared(path: Path) -> int | None:
    """Return a descriptor of `path` that holds a shared lock, None while a writer holds it.

    `unlock` gives it back. Raises FileNotFoundError, OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    _shared.add(descriptor)
    return descriptor


def unlock(descriptor: int) -> None:
    """Close what `lock_shared` has opened, which gives the lock back."""
    _shared.discard(descriptor)
    os.close(descriptor)


def _map(descriptor: int, total_bytes: int) -> mmap.mmap:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(again, total_bytes)
    finally:
        os.close(again)


_slots: weakref.WeakSet[Slot] = weakref.WeakSet()
_shared: set[int] = set()  # descriptors that hold a shared lock


def _let_go() -> None:
    for slot in tuple(_slots):
        slot.let_go()
    for descriptor in _shared:
        os.close(descriptor)
    _shared.clear()


os.register_at_fork(after_in_child=_let_go)
