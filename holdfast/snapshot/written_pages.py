"""Ask the kernel which pages of this process's memory were written since a watch began.

Linux 6.7 and later can write-protect pages so that the first write to a page causes a fault, which the kernel
resolves and records. This is the feature UFFD_FEATURE_WP_ASYNC of userfaultfd. The ioctl PAGEMAP_SCAN lists
the pages that are no longer protected (see Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst, and
include/uapi/linux/userfaultfd.h and fs.h). The kernel records writes from every source: all threads and
libraries, read(2), and other processes that use process_vm_writev or ptrace. A page is protected only once,
so a written page remains listed, and writes cause at most one fault per page.

Memory is not watched if the kernel could miss writes to it:

- shared memory and mapped files, because other processes may write them;
- all memory, if any memory is pinned when the watch begins (VmPin), because a device can write to pinned
  memory without a fault;
- a child's memory after a fork.

One case remains undetected: a read with O_DIRECT that another thread starts before the watch begins and that
ends afterwards.

Memory that is unmapped, moved or mapped again loses its registration, and a scan of it fails with EPERM. The
kernel has one defect: after a whole page table was dropped (MADV_DONTNEED of 2 MiB), a scan reports no writes
in its range until one of the pages is touched ("fs/proc/task_mmu: fix PAGEMAP_SCAN written state for PMD
holes", July 2026). So one byte for each page table is read before a scan.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import struct
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.snapshot import tensor_copy

# Each range may split a mapping into three, and a process may have only about 65,000 mappings.
MOST_RANGES = 4096
MOST_STRETCHES = 128  # a scan lists at most this many stretches; the rest of the range is treated as written

_SYSCALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd
_USER_MODE_ONLY = 1  # this needs no privilege, and suffices because the kernel resolves all faults
_NEW = 0xAA00  # USERFAULTFD_IOC_NEW of /dev/userfaultfd
_API = 0xC018AA3F  # UFFDIO_API: struct uffdio_api {api, features, ioctls}
_REGISTER = 0xC020AA00  # UFFDIO_REGISTER: struct uffdio_register {start, len, mode, ioctls}
_PROTECT = 0xC018AA06  # UFFDIO_WRITEPROTECT: struct uffdio_writeprotect {start, len, mode}
_FEATURES = 1 << 15 | 1 << 13  # UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_UNPOPULATED
_SCAN = 0xC0606610  # PAGEMAP_SCAN
_ARGUMENT = struct.Struct("=12Q")  # struct pm_scan_arg; its fifth field receives the end of the scan
_CHECKED = 2  # PM_SCAN_CHECK_WPASYNC: fail if a page is not registered
_WRITTEN = 2  # PAGE_IS_WRITTEN; if no other category is requested, the kernel uses a faster path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TABLE = 2 << 20  # a page table maps at least this many bytes

Range = tuple[int, int]  # address, bytes
Stretch = tuple[int, int]  # first byte and end byte of a stretch within a range

_log = logging.getLogger(__name__)


class WrittenPages:
    """Watches ranges of this process's memory for writes. The watch begins when the object is constructed."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        """Start watching the `MOST_RANGES` largest ranges, except those that cannot be watched.

        Raises `OSError` if the kernel does not support this.
        """
        self._pid = os.getpid()
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)
        self._watched: frozenset[Range] = frozenset()
        try:
            self._files.append(_userfaultfd())
            fcntl.ioctl(self._files[0], _API, bytearray(struct.pack("=3Q", 0xAA, _FEATURES, 0)))
            self._files.append(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))
            own = list(_anonymous())
            largest = sorted(ranges, key=_size, reverse=True)[:MOST_RANGES]
            self._watched = frozenset(
                each for each in largest if _is_within(own, each) and self._register(each)
            )
            for each in self._watched:
                self._scan(*_pages(each), 1)  # raises OSError if the kernel is too old
        except BaseException:
            self.close()
            raise
        _living.add(self)

    def _register(self, what: Range) -> bool:
        start, end = _pages(what)
        try:
            fcntl.ioctl(self._files[0], _REGISTER, bytearray(struct.pack("=4Q", start, end - start, 2, 0)))
            fcntl.ioctl(self._files[0], _PROTECT, bytearray(struct.pack("=3Q", start, end - start, 1)))
        except OSError:  # another userfaultfd watches it, or the kernel cannot protect this kind of memory
            return False
        return True

    def written(self, what: Range) -> tuple[Stretch, ...]:
        """Return the stretches of a range that may have been written since the watch began, in order.

        If the range is not watched, or is no longer watched, the result is the whole range. A write during
        the call may appear only in the next result. Any thread may call this.
        """
        address, size = what
        if not self._files or os.getpid() != self._pid or what not in self._watched:
            return ((0, size),)
        start, end = _pages(what)
        _touch(what)
        try:
            found = self._scan(start, end, MOST_STRETCHES)
        except OSError:  # EPERM: the memory was mapped again
            return ((0, size),)
        return tuple((max(at - address, 0), min(to - address, size)) for at, to in found)

    def _scan(self, start: int, end: int, most: int) -> list[Stretch]:
        vector = (ctypes.c_uint64 * (3 * most))()  # struct page_region {start, end, categories}
        given = (_ARGUMENT.size, _CHECKED, start, end, 0, ctypes.addressof(vector), most)
        argument = bytearray(_ARGUMENT.pack(*given, 0, 0, _WRITTEN, 0, _WRITTEN))
        count = fcntl.ioctl(self._files[1], _SCAN, argument)
        found = [(vector[3 * n], vector[3 * n + 1]) for n in range(count)]
        stopped = _ARGUMENT.unpack(argument)[4]
        return found if stopped >= end else [*found, (stopped, end)]

    def close(self) -> None:
        """End the watch and release the kernel's resources. After that, every range is treated as written."""
        _close(self._files)


def watch(ranges: Iterable[Range]) -> WrittenPages | None:
    """Start watching `ranges`. If that is not possible, return None and log the error at debug level."""
    try:
        if _pinned():
            return None
        return WrittenPages(ranges)
    except OSError as error:
        _log.debug("cannot watch for written pages: %s", error)
        return None


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


_living: weakref.WeakSet[WrittenPages] = weakref.WeakSet()


def _close_in_child() -> None:
    """In a forked child, close the inherited descriptors, because they refer to the parent's memory."""
    for each in list(_living):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


def _userfaultfd() -> int:
    """Return a new userfaultfd.

    If a seccomp filter is active, this opens the device /dev/userfaultfd instead of making the system call of
    that name. Some filters kill a process that makes a system call unknown to them, but they permit open(2)
    and ioctl(2), and the device needs no other calls.
    """
    if _status("Seccomp") == 0 and (number := _SYSCALL.get(platform.machine())) is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        found = int(libc.syscall(ctypes.c_long(number), flags))
        if found < 0:
            raise OSError(ctypes.get_errno(), f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        return found
    device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
    try:
        return int(fcntl.ioctl(device, _NEW, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
    finally:
        os.close(device)


def _pinned() -> bool:
    return _status("VmPin") != 0


def _status(name: str) -> int:
    """Return the number in the field `name` of /proc/self/status; -1 if the field is missing."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return -1


def _anonymous() -> Iterator[Stretch]:
    """Yield the (begin, end) of this process's private anonymous memory. Adjacent mappings are merged."""
    begin = until = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, modes, _, _, inode, *name = line.split(maxsplit=5)
        if modes[3] != "p" or inode != "0" or (name and not name[0].startswith(("[heap]", "[anon:"))):
            continue
        start, end = (int(each, 16) for each in span.split("-"))
        if start != until:
            if until:
                yield begin, until
            begin = start
        until = end
    if until:
        yield begin, until


def _size(what: Range) -> int:
    return what[1]


def _is_within(spans: list[Stretch], what: Range) -> bool:
    start, end = _pages(what)
    return any(begin <= start and end <= until for begin, until in spans)


def _pages(what: Range) -> Stretch:
    """Return the start and end addresses of the pages that a range overlaps."""
    address, size = what
    return address // _PAGE * _PAGE, -(-(address + size) // _PAGE) * _PAGE


def _touch(what: Range) -> None:
    """Read at least one byte in each page table that maps a part of the range."""
    address, size = what
    tensor_copy.sampled_bytes(address, size, size)
    ahead = -address % _TABLE
    tensor_copy.sampled_bytes(address + ahead, max(size - ahead, 0), _TABLE)
