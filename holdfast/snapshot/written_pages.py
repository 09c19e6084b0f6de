"""Which memory of this process has been written since a moment: asked of the kernel, page by page.

Linux 6.7 and later can protect pages so that the first write to one takes a fault, which the kernel
resolves by itself, and notes: userfaultfd with UFFD_FEATURE_WP_ASYNC, and the PAGEMAP_SCAN ioctl, which lists
the pages that are not protected any more (Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst;
include/uapi/linux/userfaultfd.h and fs.h). A write is seen whoever makes it: any thread, any library, the
kernel on behalf of read(2), another process through process_vm_writev or ptrace. A page is protected once and
never again, so what was written stays written: the answer only grows, and a write costs one fault per page.

What cannot be seen is not watched: memory that others may write (shared, or of a file), memory that is pinned
when the watch begins, to which a device writes without a fault (VmPin), and a child's memory after a fork.
One case remains: a read with O_DIRECT that another thread had begun before the watch and that ends after it.

Memory that is unmapped, moved, or mapped anew loses its registration, and the scan then fails (EPERM). One
hole is the kernel's: where a whole table of pages is dropped (MADV_DONTNEED of 2 MiB), the scan reports
nothing until something there is touched ("fs/proc/task_mmu: fix PAGEMAP_SCAN written state for PMD holes",
July 2026). So a byte of each table is read before.
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

MOST_RANGES = 4096  # each may cut a mapping in three, and a process may have some 65,000 mappings
MOST_STRETCHES = 128  # of one range; what lies behind them counts as written

_SYSCALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd
_USER_MODE_ONLY = 1  # enough here, for the kernel resolves all faults; needs no privilege
_NEW = 0xAA00  # USERFAULTFD_IOC_NEW of /dev/userfaultfd
_API = 0xC018AA3F  # UFFDIO_API: struct uffdio_api {api, features, ioctls}
_REGISTER = 0xC020AA00  # UFFDIO_REGISTER: struct uffdio_register {start, len, mode, ioctls}
_PROTECT = 0xC018AA06  # UFFDIO_WRITEPROTECT: struct uffdio_writeprotect {start, len, mode}
_FEATURES = 1 << 15 | 1 << 13  # UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_UNPOPULATED
_SCAN = 0xC0606610  # PAGEMAP_SCAN
_ARGUMENT = struct.Struct("=12Q")  # struct pm_scan_arg; the fifth is where the scan ended
_CHECKED = 2  # PM_SCAN_CHECK_WPASYNC: fail where something is not registered
_WRITTEN = 2  # PAGE_IS_WRITTEN; asked for alone, the kernel takes its short way

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TABLE = 2 << 20  # bytes that a table of pages maps, at least

Range = tuple[int, int]  # address, bytes
Stretch = tuple[int, int]  # from byte, to byte of a range

_log = logging.getLogger(__name__)


class WrittenPages:
    """Ranges of this process's memory, watched for writes from the moment that this was made."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        """Watch what can be watched of `ranges`, the largest first. Raises `OSError` when nothing can."""
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
            self._watched = frozenset(each for each in largest if _lies_in(own, each) and self._begin(each))
            for each in self._watched:
                self._scan(*_pages(each), 1)  # an old kernel refuses here
        except BaseException:
            self.close()
            raise
        _living.add(self)

    def _begin(self, what: Range) -> bool:
        start, end = _pages(what)
        try:
            fcntl.ioctl(self._files[0], _REGISTER, bytearray(struct.pack("=4Q", start, end - start, 2, 0)))
            fcntl.ioctl(self._files[0], _PROTECT, bytearray(struct.pack("=3Q", start, end - start, 1)))
        except OSError:  # watched by somebody else's userfaultfd, of a kind that cannot be protected
            return False
        return True

    def written(self, what: Range) -> tuple[Stretch, ...]:
        """Return the stretches of a range that may have been written since the watch began, in order.

        What was not written before this call is in none; writes from now on are for the next call. All of
        the range where it is not watched, or not any more. May be asked by any thread.
        """
        address, size = what
        if not self._files or os.getpid() != self._pid or what not in self._watched:
            return ((0, size),)
        start, end = _pages(what)
        _touch(what)
        try:
            found = self._scan(start, end, MOST_STRETCHES)
        except OSError:  # mapped anew: EPERM
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
        """Watch no more: everything counts as written. Nothing of it is left in the kernel."""
        _close(self._files)


def watch(ranges: Iterable[Range]) -> WrittenPages | None:
    """Watch these ranges from now on; None where that cannot be, which is logged at debug level."""
    try:
        if _pinned():
            return None
        return WrittenPages(ranges)
    except OSError as error:
        _log.debug("cannot ask the kernel for written pages: %s", error)
        return None


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


_living: weakref.WeakSet[WrittenPages] = weakref.WeakSet()


def _forked() -> None:
    """Close what a child has inherited: it would ask for its parent's memory."""
    for each in list(_living):
        each.close()


os.register_at_fork(after_in_child=_forked)


def _userfaultfd() -> int:
    """Return a new descriptor.

    Under a filter of system calls the call is not tried: some filters kill whoever makes one that they do not
    know. The device of the same name is a file, which no filter minds.
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
    """Return a number of /proc/self/status; -1 where it has none of that name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return -1


def _anonymous() -> Iterator[Stretch]:
    """Yield the parts of the address space that nobody else has: from, to; neighbours as one."""
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


def _lies_in(spans: list[Stretch], what: Range) -> bool:
    start, end = _pages(what)
    return any(begin <= start and end <= until for begin, until in spans)


def _pages(what: Range) -> Stretch:
    """Return where the pages begin and end that have something of the range."""
    address, size = what
    return address // _PAGE * _PAGE, -(-(address + size) // _PAGE) * _PAGE


def _touch(what: Range) -> None:
    """Read a byte of each table of pages, the first and the last one's too."""
    address, size = what
    tensor_copy.sampled_bytes(address, size, size)
    ahead = -address % _TABLE
    tensor_copy.sampled_bytes(address + ahead, max(size - ahead, 0), _TABLE)
