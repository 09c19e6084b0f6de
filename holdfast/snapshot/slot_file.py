"""Lock, allocate and map one slot file of an arena.

To access the content, a process holds the file's flock: exclusive to write, shared to read. The kernel
releases the lock when the process exits, so a dead writer blocks no other process. The lock also keeps a file
from shrinking while it is being read, which would cause a SIGBUS.

A forked child, such as a DataLoader worker, would share its parent's open file, and therefore the lock. The
lock would then remain held after the parent's death. So a child closes the files that its parent has locked.
However, the child cannot close the descriptor inside a mapping, so the file is opened a second time for each
mapping.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from pathlib import Path

from holdfast.fileio import folder_rights
from holdfast.snapshot.tensor_copy import address_of, populate

BLOCK_BYTES = 512  # the unit of st_blocks


class Slot:
    """Gives a writer access to a slot. Only one thread, across all processes, can hold the slot at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._opened_by = -1
        self._held = threading.Lock()  # flock does not exclude threads that share a descriptor
        self._mapping: mmap.mmap | None = None
        self._data: memoryview | None = None
        self._backed = False
        _slots.add(self)

    def acquire(self) -> bool:
        """Take the exclusive lock; return False, without waiting, if a reader or another writer holds it."""
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
        """Release the exclusive lock."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._held.release()

    def fit(self, total_bytes: int) -> mmap.mmap:
        """Return a mapping of exactly `total_bytes`, all of it backed by memory.

        After this call, no write to the mapping can cause a SIGBUS. If the size has not changed, the call
        makes only one system call. The caller must hold the lock.

        Raises:
            OSError: There is no room (ENOSPC). The content is undefined.
        """
        status = os.fstat(self._descriptor)
        if status.st_size != total_bytes or status.st_blocks * BLOCK_BYTES < total_bytes:
            if status.st_size != total_bytes:
                self._unmap()
            if status.st_size > total_bytes:
                os.ftruncate(self._descriptor, total_bytes)
            # A single call both extends the file and allocates its memory, so a killed writer never leaves a
            # sparse file of full size.
            os.posix_fallocate(self._descriptor, 0, total_bytes)
        if self._mapping is None or len(self._mapping) != total_bytes:
            self._unmap()
            self._mapping = _map(self._descriptor, total_bytes)
        return self._mapping

    def stretch(self, total_bytes: int) -> mmap.mmap:
        """Return a mapping of exactly `total_bytes`, most of which may have no memory yet.

        Call `back` for a range before writing to that range. The caller must hold the lock. A killed writer
        may leave a sparse file without a record. When that slot is used again, `fit` allocates the missing
        memory.

        Raises:
            OSError: There is certainly not enough room (ENOSPC), or the file cannot be mapped.
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
        """Allocate memory for a range, which is necessary before a write to that range.

        After this call, no write to the range can cause a SIGBUS. The caller must hold the lock; several of
        its threads may call this at the same time.

        Raises:
            OSError: There is no room (ENOSPC).
        """
        if not self._backed:
            os.posix_fallocate(self._descriptor, begin, end - begin)
        if self._mapping is not None:
            populate(address_of(self._mapping) + begin, end - begin)

    def whole(self, total_bytes: int) -> mmap.mmap | None:
        """Return the mapping that `fit` would return, or None if `fit` would have to change the file first.

        The caller need not hold the lock, because this neither reads nor writes the content. No other thread
        may use this slot during the call.

        Raises:
            OSError: The file cannot be mapped.
        """
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        if status.st_size != total_bytes or status.st_blocks * BLOCK_BYTES < total_bytes:
            return None
        self._open()
        if os.fstat(self._descriptor).st_size != total_bytes:  # another process has just changed the file
            return None
        if self._mapping is None or len(self._mapping) != total_bytes:
            self._unmap()
            self._mapping = _map(self._descriptor, total_bytes)
        return self._mapping

    def put_header(self, header: bytes) -> memoryview:
        """Write `header` unless the file already begins with it; return the data area after the header.

        The returned view is the same object while the mapping and the header's size stay the same. The caller
        must hold the lock and must have called `fit`.
        """
        mapping = self._mapping
        assert mapping is not None
        if mapping[: len(header)] != header:
            mapping[: len(header)] = header
        if self._data is None or len(self._data) != len(mapping) - len(header):
            self._data = memoryview(mapping)[len(header) :]
        return self._data

    def size_bytes(self) -> int:
        """Return the size of the file. The caller need not hold the lock.

        Raises OSError, for example if the file is missing.
        """
        if self._is_open():
            status = os.fstat(self._descriptor)  # this takes half as long as a `stat` by path
            if status.st_nlink:
                return status.st_size
        return os.stat(self._path).st_size  # noqa: PTH116  # faster than Path.stat; called in every snapshot

    def close(self) -> None:
        """Release the mapping and the descriptor. Existing views remain valid."""
        self._unmap()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        if self._is_open() and self._is_reachable():
            return
        self.close()
        self._descriptor = folder_rights.open_file(self._path)
        self._opened_by = os.getpid()

    def _is_reachable(self) -> bool:
        """Return whether other processes can still open the same file by its path.

        If the file was removed, this is possible only after the keeper has restored it. A restored file still
        has no hard link, but its path is a symbolic link to it.
        """
        ours = os.fstat(self._descriptor)
        if ours.st_nlink:
            return True
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    def _is_open(self) -> bool:
        """Return whether the file is open and was opened by this process.

        The result is False for a descriptor that was inherited from the parent, because its lock is shared.
        """
        return self._descriptor >= 0 and self._opened_by == os.getpid()

    def close_inherited(self) -> None:
        """In a forked child, close the inherited descriptor, so that only the parent holds the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._held = threading.Lock()

    def _unmap(self) -> None:
        # Do not close the mapping, because tensors may still use it. It is unmapped when the last of them is
        # freed.
        self._data = None
        self._mapping = None


def lock_shared(path: Path) -> int | None:
    """Return a descriptor of `path` that holds a shared lock, or None if a writer holds the exclusive lock.

    Pass the descriptor to `unlock` to release the lock. Raises FileNotFoundError, OSError.
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
    """Close a descriptor from `lock_shared`, which releases the lock."""
    _shared.discard(descriptor)
    os.close(descriptor)


def _map(descriptor: int, total_bytes: int) -> mmap.mmap:
    reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(reopened, total_bytes)
    finally:
        os.close(reopened)


_slots: weakref.WeakSet[Slot] = weakref.WeakSet()
_shared: set[int] = set()  # descriptors that hold a shared lock


def _close_inherited_files() -> None:
    for slot in tuple(_slots):
        slot.close_inherited()
    for descriptor in _shared:
        os.close(descriptor)
    _shared.clear()


os.register_at_fork(after_in_child=_close_inherited_files)
