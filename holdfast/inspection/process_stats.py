"""What /proc shows of a process and its descendants: states, CPU time, bytes, and what its threads wait in.

Of a process that is gone, or cannot be read, every function returns what is left to know: none raises.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.inspection import thread_waits

MAX_PROCESSES = 256  # descendants of one rank that are looked at
MAX_THREADS = 512  # of one process
_LOADERS = "pt_data_"  # processes of torch's data loaders: its handler of SIGCHLD reports only their deaths
_DEVICES = tuple(
    f"/dev/{each}" for each in ("nvidia", "kfd", "dri", "dxg", "accel", "habana", "neuron", "infiniband")
)
_LIBRARIES = (b"/libmpi", b"/libmpich", b"/libucp.", b"/libucc.", b"/libfabric.", b"/libibverbs.")
_MAX_MAPS = 1 << 22  # bytes of /proc/PID/maps
_MACHINE = platform.machine()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one instant."""

    state: str  # X when it is gone
    traced: bool
    cpu_s: float
    io_bytes: int
    io_calls: int


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """A process and its descendants at one instant."""

    own: Sample
    below: dict[int, Sample]


def tree(pid: int) -> ProcessTree:
    """Return `pid` and its descendants now."""
    return ProcessTree(sample(pid), {each: sample(each) for each in descendants(pid)})


def descendants(pid: int) -> list[int]:
    """Return the descendants of `pid`, at most `MAX_PROCESSES`. Threads of it may have children too."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < MAX_PROCESSES:
        for task in _tasks(left.pop()):
            children = [int(word) for word in _read(f"{task}/children").split() if word.isdigit()]
            found += children
            left += children
    return found[:MAX_PROCESSES]


def sample(pid: int) -> Sample:
    """Return `pid` now."""
    fields = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()
    if not fields:
        return Sample("X", False, 0.0, 0, 0)
    status = _named(_read(f"/proc/{pid}/status"))
    moved = _named(_read(f"/proc/{pid}/io"))
    names = ("rchar", "wchar", "read_bytes", "write_bytes")
    return Sample(
        state=fields[0],
        traced=_number(status, "TracerPid") != 0,
        cpu_s=_cpu_s(pid),
        io_bytes=sum(_number(moved, name) for name in names),
        io_calls=_number(moved, "syscr") + _number(moved, "syscw"),
    )


def is_stopped(pid: int) -> bool:
    """True while a signal has stopped `pid`, and no debugger: it does nothing until it is continued.

    These files can be read whatever the process is at: no lock of its own is needed for them.
    """
    if _read(f"/proc/{pid}/stat").rpartition(") ")[2][:1] != "T":
        return False
    return _number(_named(_read(f"/proc/{pid}/status")), "TracerPid") == 0


def wait_of(pid: int, tid: int) -> str:
    """Return what a thread of `pid` waits in: one of the words of `holdfast.inspection.thread_waits`."""
    state = _read(f"/proc/{pid}/task/{tid}/stat").rpartition(") ")[2][:1]
    if state == "D":
        return thread_waits.FILE
    call = _read(f"/proc/{pid}/task/{tid}/syscall")
    found = thread_waits.of(call, _MACHINE)
    return _kind_of_read(pid, call) if found == thread_waits.FILE else found


def _kind_of_read(pid: int, call: str) -> str:
    """Distinguish a read from a pipe or a socket from one of a file: only a file system has to answer."""
    try:
        target = str(Path(f"/proc/{pid}/fd/{int(call.split()[1], 16)}").readlink())
    except (OSError, IndexError, ValueError):  # a call on a path, or a descriptor that is closed by now
        return thread_waits.FILE
    if target.startswith("socket:"):
        return thread_waits.NETWORK
    return thread_waits.POLL if target.startswith(("pipe:", "anon_inode:")) else thread_waits.FILE


def signal_may_end(pid: int) -> bool:
    """Return True if a signal handler of `pid` may end what its main thread waits in."""
    caught = _named(_read(f"/proc/{pid}/status")).get("SigCgt", "0")
    own = [each for each in descendants(pid) if not _read(f"/proc/{each}/comm").startswith(_LOADERS)]
    try:
        return thread_waits.may_be_ended(int(caught, 16), children=bool(own))
    except ValueError:
        return False


def catches(pid: int, signum: int) -> bool:
    """Return True if `pid` has a handler for a signal."""
    try:
        caught = int(_named(_read(f"/proc/{pid}/status")).get("SigCgt", "0"), 16)
    except ValueError:
        return False
    return bool(caught >> (signum - 1) & 1)


def meets_unseen(pid: int) -> bool:
    """True unless `pid` is seen to have nothing through which it could wait for others as if it worked.

    That is a device, which runs collectives that the process polls for, and libraries such as MPI's. Of its
    descendants the devices count.
    """
    return any(_has_device(each) for each in (pid, *descendants(pid))) or _has_library(pid)


def _has_device(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208  # in a hot loop
    except FileNotFoundError:  # it has ended
        return False
    except OSError:
        return True
    for name in names:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{folder}/{name}").startswith(_DEVICES):  # noqa: PTH115
                return True
    return False


def _has_library(pid: int) -> bool:
    """Return True if `pid` has mapped a library for meeting others, and also when that cannot be read."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            found = file.read(_MAX_MAPS)
    except OSError:
        return True
    return len(found) in (0, _MAX_MAPS) or any(each in found for each in _LIBRARIES)


def waits_of(pid: int) -> tuple[str, ...]:
    """Return what all threads of `pid` wait in."""
    return tuple(wait_of(pid, tid) for tid in threads(pid))


def call_of(pid: int, tid: int) -> str:
    """Return the kernel's line about the system call that a thread of `pid` is in, "" for none."""
    return _read(f"/proc/{pid}/task/{tid}/syscall")


def queue_of(pid: int, tid: int) -> str:
    """Return the kernel's function that a thread of `pid` sleeps in; "" or "0" where that is not shown."""
    return _read(f"/proc/{pid}/task/{tid}/wchan").strip()


def ran(pid: int, tid: int) -> str:
    """Return a text that changes each time a thread of `pid` runs; "" where the kernel does not count."""
    return _read(f"/proc/{pid}/task/{tid}/schedstat").strip()


def threads(pid: int) -> dict[int, str]:
    """Return the names of the threads of `pid` by number, at most `MAX_THREADS`."""
    return {int(Path(task).name): _read(f"{task}/comm").strip() for task in _tasks(pid)}


def _cpu_s(pid: int) -> float:
    """Return the CPU time of the live threads, to the microsecond: a tick is too coarse here."""
    total_ns = 0
    for task in _tasks(pid):
        words = _read(f"{task}/schedstat").split()
        if words and words[0].isdigit():
            total_ns += int(words[0])
    if total_ns:
        return total_ns / 1e9
    fields = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()  # a kernel without CONFIG_SCHED_INFO
    return (int(fields[11]) + int(fields[12])) * _TICK_S if len(fields) > 12 else 0.0


def _tasks(pid: int) -> list[str]:
    folder = f"/proc/{pid}/task"
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)[:MAX_THREADS]]  # noqa: PTH208  # in a hot loop
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode(errors="replace")
    except OSError:
        return ""


def _named(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


def _number(found: dict[str, str], name: str) -> int:
    value = found.get(name, "").strip()
    return int(value) if value.isdigit() else 0
