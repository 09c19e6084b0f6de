"""Read /proc for a process and its descendants: states, CPU time, I/O, and where its threads wait.

If a process has exited or cannot be read, no function raises; the result is then empty or partial.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.inspection import thread_waits

MAX_PROCESSES = 256  # how many descendants of one rank are examined
MAX_THREADS = 512  # how many threads of one process are examined
# The prefix of the names of torch's data loader processes. Torch's SIGCHLD handler reports only their deaths.
_LOADERS = "pt_data_"
_DEVICES = tuple(
    f"/dev/{each}" for each in ("nvidia", "kfd", "dri", "dxg", "accel", "habana", "neuron", "infiniband")
)
_LIBRARIES = (b"/libmpi", b"/libmpich", b"/libucp.", b"/libucc.", b"/libfabric.", b"/libibverbs.")
_STAT_BYTES = 96  # the beginning of /proc/PID/stat, which includes the longest name and the state
_MAX_MAPS = 1 << 22  # how many bytes of /proc/PID/maps are read
_MACHINE = platform.machine()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one instant."""

    state: str  # X if it does not exist
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
    """Return the current state of `pid` and its descendants."""
    return ProcessTree(sample(pid), {each: sample(each) for each in descendants(pid)})


def descendants(pid: int) -> list[int]:
    """Return at most `MAX_PROCESSES` descendants of `pid`, including children that other threads started."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < MAX_PROCESSES:
        for task in _tasks(left.pop()):
            children = [int(word) for word in _read(f"{task}/children").split() if word.isdigit()]
            found += children
            left += children
    return found[:MAX_PROCESSES]


def sample(pid: int) -> Sample:
    """Return the current state of `pid`."""
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
    """Return whether a signal has stopped `pid`, which must then be continued. Excludes a debugger's stop.

    This never blocks, because reading these files takes none of the process's locks.
    """
    if _read(f"/proc/{pid}/stat", _STAT_BYTES).rpartition(") ")[2][:1] != "T":
        return False
    return _number(_named(_read(f"/proc/{pid}/status")), "TracerPid") == 0


def wait_of(pid: int, tid: int) -> str:
    """Return how a thread of `pid` waits, as one of the constants of `holdfast.inspection.thread_waits`."""
    state = _read(f"/proc/{pid}/task/{tid}/stat").rpartition(") ")[2][:1]
    if state == "D":
        return thread_waits.FILE
    call = _read(f"/proc/{pid}/task/{tid}/syscall")
    found = thread_waits.of(call, _MACHINE)
    return _kind_of_read(pid, call) if found == thread_waits.FILE else found


def _kind_of_read(pid: int, call: str) -> str:
    """Classify a read by its source: a pipe or socket depends on a peer, a file only on the file system."""
    try:
        target = str(Path(f"/proc/{pid}/fd/{int(call.split()[1], 16)}").readlink())
    except (OSError, IndexError, ValueError):  # the call uses a path, or its descriptor has been closed
        return thread_waits.FILE
    if target.startswith("socket:"):
        return thread_waits.NETWORK
    return thread_waits.POLL if target.startswith(("pipe:", "anon_inode:")) else thread_waits.FILE


def signal_may_end(pid: int) -> bool:
    """Return True if one of the signal handlers of `pid` could end a wait of its main thread."""
    caught = _named(_read(f"/proc/{pid}/status")).get("SigCgt", "0")
    own = [each for each in descendants(pid) if not _read(f"/proc/{each}/comm").startswith(_LOADERS)]
    try:
        return thread_waits.may_be_ended(int(caught, 16), children=bool(own))
    except ValueError:
        return False


def catches(pid: int, signum: int) -> bool:
    """Return whether `pid` has a handler for the signal `signum`."""
    try:
        caught = int(_named(_read(f"/proc/{pid}/status")).get("SigCgt", "0"), 16)
    except ValueError:
        return False
    return bool(caught >> (signum - 1) & 1)


def may_wait_unseen(pid: int) -> bool:
    """Return True if `pid` might be waiting for other ranks even though it appears to be busy.

    This is possible if it has opened a device that runs collectives, because it polls the device, or if it
    uses a library such as MPI. This includes devices that its descendants have opened.
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
        with suppress(OSError):  # it has been closed
            if os.readlink(f"{folder}/{name}").startswith(_DEVICES):  # noqa: PTH115
                return True
    return False


def _has_library(pid: int) -> bool:
    """Return True if `pid` has mapped a library for collectives, or if its mappings cannot be read."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            found = file.read(_MAX_MAPS)
    except OSError:
        return True
    return len(found) in (0, _MAX_MAPS) or any(each in found for each in _LIBRARIES)


def waits_of(pid: int) -> tuple[str, ...]:
    """Return how each thread of `pid` waits."""
    return tuple(wait_of(pid, tid) for tid in threads(pid))


def call_of(pid: int, tid: int) -> str:
    """Return the kernel's description of the current system call of a thread of `pid`; "" for none."""
    return _read(f"/proc/{pid}/task/{tid}/syscall")


def queue_of(pid: int, tid: int) -> str:
    """Return the kernel function where a thread of `pid` sleeps; "" or "0" if it is not shown."""
    return _read(f"/proc/{pid}/task/{tid}/wchan").strip()


def ran(pid: int, tid: int) -> str:
    """Return a text that changes each time the thread `tid` runs; "" if the kernel keeps no such count."""
    return _read(f"/proc/{pid}/task/{tid}/schedstat").strip()


def threads(pid: int) -> dict[int, str]:
    """Return the names of the threads of `pid` by number, at most `MAX_THREADS`."""
    return {int(Path(task).name): _read(f"{task}/comm").strip() for task in _tasks(pid)}


def _cpu_s(pid: int) -> float:
    """Return the CPU time of the live threads with microsecond resolution; a clock tick is too coarse."""
    total_ns = 0
    for task in _tasks(pid):
        words = _read(f"{task}/schedstat").split()
        if words and words[0].isdigit():
            total_ns += int(words[0])
    if total_ns:
        return total_ns / 1e9
    fields = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()  # for kernels without CONFIG_SCHED_INFO
    return (int(fields[11]) + int(fields[12])) * _TICK_S if len(fields) > 12 else 0.0


def _tasks(pid: int) -> list[str]:
    folder = f"/proc/{pid}/task"
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)[:MAX_THREADS]]  # noqa: PTH208  # in a hot loop
    except OSError:
        return []


def _read(path: str, most: int = 1 << 16) -> str:
    """Return at most `most` bytes of a file. Plain system calls, because every poll of a part reads files."""
    found = b""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(found) < most and (more := os.read(descriptor, most - len(found))):
                found += more
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return found.decode(errors="replace")


def _named(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


def _number(found: dict[str, str], name: str) -> int:
    value = found.get(name, "").strip()
    return int(value) if value.isdigit() else 0
