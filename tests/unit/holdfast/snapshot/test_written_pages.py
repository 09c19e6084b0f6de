"""The kernel reports writes to this process's memory. Some memory is not watched."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.snapshot import written_pages
from tests.sandbox import in_child

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE
AT = 9 * PAGE + 100  # the offset where the tests write
NINTH = ((9 * PAGE, 10 * PAGE),)
TABLE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class Memory:
    """Private memory, filled."""

    def __init__(self, size: int = SIZE) -> None:
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.write(b"a" * size)
        self.range = ctypes.addressof(ctypes.c_char.from_buffer(self.map)), size


def watched(*ranges: written_pages.Range) -> written_pages.WrittenPages:
    found = written_pages.watch(ranges)
    if found is None:
        pytest.skip("this kernel, or a filter of system calls, does not tell of writes")
    return found


def directly(memory: Memory, folder: Path) -> None:
    memory.map[AT] = 1


def another_thread(memory: Memory, folder: Path) -> None:
    thread = threading.Thread(target=directly, args=(memory, folder))
    thread.start()
    thread.join()


def a_thread_in_c(memory: Memory, folder: Path) -> None:
    thread = ctypes.c_ulong()
    address = ctypes.c_void_p(memory.range[0] + AT + 4)
    assert _libc.pthread_create(ctypes.byref(thread), None, _libc.time, address) == 0
    assert _libc.pthread_join(thread, None) == 0


def memmove(memory: Memory, folder: Path) -> None:
    ctypes.memmove(memory.range[0] + AT, b"b" * 100, 100)


def file_of_ours(folder: Path) -> Path:
    path = folder / "content"
    path.write_bytes(b"b" * PAGE)
    return path


def readinto(memory: Memory, folder: Path) -> None:
    with file_of_ours(folder).open("rb", buffering=0) as file:
        assert file.readinto(memoryview(memory.map)[AT : AT + 100])


def preadv(memory: Memory, folder: Path) -> None:
    with file_of_ours(folder).open("rb") as file:
        assert os.preadv(file.fileno(), [memoryview(memory.map)[AT : AT + 100]], 0) == 100


def past_the_cache(memory: Memory, folder: Path) -> None:
    try:
        file = os.open(file_of_ours(folder), os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("no O_DIRECT in this file system")
    assert os.preadv(file, [memoryview(memory.map)[9 * PAGE : 10 * PAGE]], 0) == PAGE
    os.close(file)


def from_a_socket(memory: Memory, folder: Path) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.send(b"b" * 100)
        assert other.recv_into(memoryview(memory.map)[AT : AT + 100]) == 100


def from_outside(memory: Memory, folder: Path) -> None:
    """Write like another process's process_vm_writev: the kernel uses the same path for the own process."""
    content = ctypes.create_string_buffer(b"b" * 100)
    here, there = ((ctypes.c_size_t * 2)(at, 100) for at in (ctypes.addressof(content), memory.range[0] + AT))
    assert _libc.process_vm_writev(os.getpid(), here, 1, there, 1, 0) == 100


def by_a_debugger(memory: Memory, folder: Path) -> None:
    file = os.open("/proc/self/mem", os.O_RDWR)
    assert os.pwrite(file, b"b" * 100, memory.range[0] + AT) == 100
    os.close(file)


def dropped(memory: Memory, folder: Path) -> None:
    memory.map.madvise(mmap.MADV_DONTNEED, 9 * PAGE, PAGE)


WAYS = [
    directly,
    another_thread,
    a_thread_in_c,
    memmove,
    readinto,
    preadv,
    past_the_cache,
    from_a_socket,
    from_outside,
    by_a_debugger,
    dropped,
]


@pytest.mark.parametrize("write", WAYS, ids=lambda way: way.__name__)
def test_a_write_is_detected_whoever_makes_it(write: Callable[[Memory, Path], None], tmp_path: Path) -> None:
    memory = Memory()
    memory.map[20 * PAGE] = 1  # before the watch begins
    watch = watched(memory.range)
    assert watch.written(memory.range) == ()
    write(memory, tmp_path)
    assert memory.map[9 * PAGE : 10 * PAGE] != b"a" * PAGE
    assert watch.written(memory.range) == NINTH
    assert watch.written(memory.range) == NINTH  # written pages stay reported as written
    memory.map[30 * PAGE] = 1
    assert watch.written(memory.range) == (*NINTH, (30 * PAGE, 31 * PAGE))


def test_a_write_beside_a_range_marks_at_most_one_page_of_it() -> None:
    memory = Memory()
    address, _ = memory.range
    part = address + 300, 5 * PAGE
    watch = watched(part)
    memory.map[0] = 1
    memory.map[5 * PAGE + 301] = 1
    memory.map[6 * PAGE] = 1
    assert watch.written(part) == ((0, PAGE - 300), (5 * PAGE - 300, 5 * PAGE))
    assert watch.written((address, SIZE)) == ((0, SIZE),)  # not a range that is watched


def test_the_number_of_written_stretches_is_bounded() -> None:
    memory = Memory(4 * written_pages.MOST_STRETCHES * PAGE)
    watch = watched(memory.range)
    for page in range(0, 4 * written_pages.MOST_STRETCHES, 2):
        memory.map[page * PAGE] = 1
    found = watch.written(memory.range)
    assert len(found) == written_pages.MOST_STRETCHES + 1
    assert found[-1][1] == memory.range[1]
    written = {page for at, to in found for page in range(at // PAGE, to // PAGE)}
    assert written >= set(range(0, 4 * written_pages.MOST_STRETCHES, 2))


def test_no_more_ranges_are_watched_than_the_kernel_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of mappings of a process is limited. With none left, it could not allocate memory."""
    monkeypatch.setattr(written_pages, "MOST_RANGES", 2)
    memory = Memory()
    address, _ = memory.range
    ranges = [(address + 16 * n * PAGE, size * PAGE) for n, size in enumerate((1, 5, 3, 2))]
    watch = watched(*ranges)
    assert [watch.written(each) == () for each in ranges] == [False, True, True, False]


def test_memory_that_was_never_touched_is_watched() -> None:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = ctypes.addressof(ctypes.c_char.from_buffer(memory)), SIZE
    watch = watched(whole)
    assert memory[:] == bytes(SIZE)
    assert watch.written(whole) == ()
    memory[AT] = 1
    assert watch.written(whole) == NINTH


def test_other_memory_at_the_same_address_counts_as_written() -> None:
    memory = Memory()
    address, size = memory.range
    watch = watched(memory.range)
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    again = _libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), 3, fixed, -1, ctypes.c_long(0))
    assert again == address
    assert watch.written(memory.range) == ((0, size),)
    assert memory.map[:] == bytes(size)
    assert watch.written(memory.range) == ((0, size),)


@pytest.mark.parametrize("huge", [False, True], ids=["small pages", "huge pages"])
def test_a_dropped_page_table_counts_as_written(huge: bool) -> None:
    memory = mmap.mmap(-1, 4 * TABLE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(b"a" * len(memory))
    whole = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    watch = watched(whole)
    assert watch.written(whole) == ()
    begin = -whole[0] % TABLE
    memory.madvise(mmap.MADV_DONTNEED, begin, 2 * TABLE)
    assert watch.written(whole) == ((begin, begin + 2 * TABLE),)
    memory[begin + 5 * PAGE] = 1
    assert watch.written(whole) == ((begin, begin + 2 * TABLE),)


def test_memory_that_other_processes_may_write_is_not_watched(tmp_path: Path) -> None:
    path = tmp_path / "content"
    path.write_bytes(b"a" * SIZE)
    with path.open("rb+") as file:
        maps = [
            mmap.mmap(-1, SIZE),  # shared with children
            mmap.mmap(file.fileno(), SIZE),
            mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        ]
    ranges = [(ctypes.addressof(ctypes.c_char.from_buffer(each)), SIZE) for each in maps]
    memory = Memory()
    watch = watched(memory.range, *ranges)
    assert watch.written(memory.range) == ()
    assert [watch.written(each) for each in ranges] == [((0, SIZE),)] * 3


WITH_PINNED_MEMORY = """
import ctypes, mmap
from holdfast.snapshot import written_pages as writes
libc = ctypes.CDLL(None, use_errno=True)
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
whole = ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20
ring = libc.syscall(ctypes.c_long(425), ctypes.c_uint(4), ctypes.create_string_buffer(120))
buffer = (ctypes.c_size_t * 2)(*whole)
done = ring >= 0 and libc.syscall(ctypes.c_long(427), ring, ctypes.c_uint(0), buffer, ctypes.c_uint(1)) == 0
print(writes.watch([whole]) is None if done else "no io_uring")
"""


def test_nothing_is_watched_while_memory_is_pinned() -> None:
    """The kernel may write to such memory at any time, as to io_uring's buffers and RDMA's regions."""
    watched(Memory().range).close()
    found = printed(WITH_PINNED_MEMORY)
    if found == "no io_uring":
        pytest.skip(found)
    assert found == "True"


def test_a_child_does_not_query_the_memory_of_its_parent() -> None:
    memory = Memory()
    watch = watched(memory.range)

    def child() -> None:
        assert watch.written(memory.range) == ((0, SIZE),)
        memory.map[40 * PAGE] = 1  # its own copy
        watch.close()

    assert in_child(child) == 0
    assert watch.written(memory.range) == ()  # the parent's watch continues
    memory.map[AT] = 1  # to a page that both processes shared
    assert watch.written(memory.range) == NINTH


def test_a_closed_watch_reports_nothing() -> None:
    memory = Memory()
    watch = watched(memory.range)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count, not paths
    watch.close()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2  # noqa: PTH208
    assert watch.written(memory.range) == ((0, SIZE),)
    again = watched(memory.range)
    assert again.written(memory.range) == ()


def test_the_memory_of_another_watch_is_not_affected() -> None:
    memory = Memory()
    first = watched(memory.range)
    second = watched(memory.range)
    assert second.written(memory.range) == ((0, SIZE),)
    assert first.written(memory.range) == ()


UNDER_A_FILTER = """
import ctypes, mmap, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
action = int(sys.argv[1])
number = {"x86_64": 323, "aarch64": 282}[__import__("platform").machine()]
program = b"".join(struct.pack("HBBI", *each) for each in (
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, action), (0x06, 0, 0, 0x7FFF0000)))
content = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(content)))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter, 0, 0) == 0  # PR_SET_SECCOMP
from holdfast.snapshot import written_pages as writes
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
whole = ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20
watch = writes.watch([whole])
print(watch is None or watch.written(whole) == ())
"""


@pytest.mark.parametrize("action", [0x80000000, 0x00050001], ids=["kills", "refuses"])
def test_with_a_filter_of_system_calls_no_watch_is_attempted(action: int) -> None:
    """Docker's default refuses userfaultfd; some filters kill a process for a call that they do not list."""
    assert printed(UNDER_A_FILTER, str(action)) == "True"


def printed(script: str, *arguments: str) -> str:
    """Return what a script prints in a separate process."""
    argv = [sys.executable, "-c", script, *arguments]
    found = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert found.returncode == 0, (found.returncode, found.stderr)
    return found.stdout.strip()


def test_a_kernel_that_refuses_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr(written_pages, "_FEATURES", 1 << 62)  # as an older kernel does
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count, not paths
    assert written_pages.watch([memory.range]) is None
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_the_structures_match_the_kernels_layout() -> None:
    """The sizes are part of the ioctls' numbers."""
    assert written_pages._ARGUMENT.size == written_pages._SCAN >> 16 & 0x3FFF
    assert [
        n >> 16 & 0x3FFF for n in (written_pages._API, written_pages._REGISTER, written_pages._PROTECT)
    ] == [struct.calcsize(layout) for layout in ("=3Q", "=4Q", "=3Q")]
