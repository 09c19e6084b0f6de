"""Decide whether a rank in a collective is at rest: only data from a peer can then wake it.

A rank is considered at rest only if all of the following are observed:

- Its main thread is in a collective that torch runs on gloo.
- Each thread waits for a lock that only this process can release. The wait either has no time limit or has a
  deadline, which is read from the process's memory. Holdfast's own threads and tqdm's monitor must be waiting
  when they are checked, but may run between two checks. The thread that serves torch's store is ignored: it
  can wake only threads that query the store, and those wait on a socket.
- gloo's loops, which poll their sockets a hundred times a second, wait only for connections that have both
  ends on this host and no unread or unacknowledged bytes. A connection between hosts does not qualify,
  because a middlebox may acknowledge bytes before they arrive.
- The rank has no device open, and no handler for a signal that could end a wait.

If none of the rank's threads ran between two inspections, and no byte was sent or received, both inspections
have the same `mark`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.inspection import process_stats, python_stacks, tcp_sockets, thread_waits
from holdfast.inspection.python_stacks import Frame, Thread
from holdfast.inspection.tcp_sockets import Connection
from holdfast.process import clock

FOREVER_S = 1e9  # the result for a rank without a time limit on any of its waits
MAX_ENDS = 8192  # a rank with more connections is never considered at rest
MAX_FILES = 8192
_LOOP = "gloo_tcp_loop"
_STORE = "pt_tcpstore"
_MONITOR = "tqdm/_monitor.py"
_PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_PLAIN_FOLDERS = ("/dev/shm/", "/dev/pts/")
# The number of attempts to observe a gloo loop while it waits. It runs for microseconds every ten
# milliseconds.
_POLLS = 40
_POLL_S = 0.001
_SUM_BYTES = 8
OURS_WAIT = frozenset(
    {
        thread_waits.LOCK,
        thread_waits.TIMED_LOCK,
        thread_waits.NETWORK,
        thread_waits.ACCEPT,
        thread_waits.POLL,
    }
)
# tqdm's monitor must be waiting for its own lock, because while it writes it holds a lock that other threads
# need.
_MONITOR_WAITS = frozenset({thread_waits.TIMED_LOCK})
_TIME = struct.Struct("=qq")  # timespec
_MACHINE = platform.machine()
_COLLECTIVES = frozenset(
    {
        *("barrier", "broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "send", "recv"),
        *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced"),
        *("gather", "scatter", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single", "_all_gather_base", "_reduce_scatter_base"),
    }
)


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """The result of an inspection. If the rank is not certain to be at rest, `stirs` gives the reason."""

    stirs: str = ""
    seconds: float = 0.0  # the time until the first of its waits times out; 0 if it is not at rest
    mark: int = 0
    # A checksum of its connections. If every connection joins two of the ranks, the ranks' checksums cancel
    # out.
    ends: int = 0


class _NotAtRest(Exception):  # raised to end the inspection of a rank that is not at rest
    """The rank may still make progress. The message gives the reason."""


def of(pid: int, found: tuple[Thread, ...], ours: frozenset[int]) -> CollectiveWait:
    """Return whether `pid` is at rest. Never raises.

    `found` contains the Python threads of `pid`, and `ours` the ids of Holdfast's own threads among them.
    """
    at = python_stacks.innermost(found)
    if not in_collective(at):
        return CollectiveWait(
            "its main thread is not in a gloo collective" if found else "its stack is not known"
        )
    try:
        return _wait_at_rest(pid, _Threads(pid, found, ours))
    except _NotAtRest as why:
        return CollectiveWait(str(why))
    except (OSError, ValueError, IndexError, OverflowError, struct.error) as error:
        return CollectiveWait(f"it cannot be inspected completely: {error}"[:200])


def in_collective(at: str) -> bool:
    """Return whether `at`, a rank's innermost function, only waits for other ranks on gloo."""
    function, _, file = at.partition(" (")
    name = function.rpartition(".")[2]
    if "torch/autograd/" in file:
        return name == "_engine_run_backward"
    if "torch/nn/parallel/distributed.py" in file:
        return name == "_distributed_broadcast_coalesced"
    return "torch/distributed/distributed_c10d.py" in file and name in _COLLECTIVES


def sum_of(host: str, found: Iterable[Connection]) -> int:
    """Return a checksum of connections on `host`. The two ends of a connection cancel out when xored."""
    total = 0
    for each in found:
        text = " ".join((host, *sorted((each.local, each.remote))))
        total ^= _number(text)
    return total


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_SUM_BYTES).digest(), "big")


class _Threads:
    """The threads of a process, grouped by the condition that each must meet.

    The threads in `names` must be at rest. The threads in `aside`, which maps each thread to its permitted
    waits, need only be waiting when they are checked. `loops` contains gloo's loops.
    """

    def __init__(self, pid: int, found: tuple[Thread, ...], ours: frozenset[int]) -> None:
        self._pid = pid
        monitors = {each.tid for each in found if any(map(_is_monitor, each.frames))}
        self.aside = dict.fromkeys(ours, OURS_WAIT) | dict.fromkeys(monitors, _MONITOR_WAITS)
        names = process_stats.threads(pid)
        if not 0 < len(names) < process_stats.MAX_THREADS:
            raise _NotAtRest(f"it has {len(names)} threads")
        self.loops = sorted(tid for tid, name in names.items() if name.startswith(_LOOP))
        self.names = {tid: name for tid, name in names.items() if self._counts(tid, name)}

    def _counts(self, tid: int, name: str) -> bool:
        return not (tid in self.aside or name.startswith((_LOOP, _STORE)))

    def ran(self) -> list[tuple[int, str]]:
        """Return, for each thread that must be at rest, the kernel's record of how often it has run."""
        found = [(tid, process_stats.ran(self._pid, tid)) for tid in sorted(self.names)]
        if not all(text for _, text in found):
            raise _NotAtRest("the kernel does not count when its threads run")
        return found

    def has_more(self) -> bool:
        """Return whether the set of threads that must be at rest has changed."""
        known = process_stats.threads(self._pid)
        return {tid for tid, name in known.items() if self._counts(tid, name)} != set(self.names)


def _is_monitor(frame: Frame) -> bool:
    return frame.file.endswith(_MONITOR)


def _wait_at_rest(pid: int, threads: _Threads) -> CollectiveWait:
    """Return how long `pid` will be at rest. Raises `_NotAtRest`, and any error from reading /proc."""
    before = threads.ran()
    seconds = min([FOREVER_S, *(_rests_s(pid, tid, name) for tid, name in threads.names.items())])
    for tid, allowed in threads.aside.items():
        if process_stats.ran(pid, tid) and process_stats.wait_of(pid, tid) not in allowed:
            raise _NotAtRest("a thread of Holdfast or tqdm is running")
    if process_stats.signal_may_end(pid):
        raise _NotAtRest("it handles a signal that could end a wait")
    _no_device(pid)
    watched = {socket for tid in threads.loops for socket in _watched(pid, _waits_in(pid, tid))}
    found = _quiet(pid, watched)
    # Check the loops again after reading the sockets, because a loop that is waiting now has handled
    # everything that arrived earlier.
    for tid in threads.loops:
        _waits_in(pid, tid)
    if threads.has_more() or threads.ran() != before:
        raise _NotAtRest("one of its threads has run")
    moved = [(each.inode, each.received, each.acknowledged) for each in found]
    return CollectiveWait(
        seconds=seconds,
        mark=_number(repr((before, sorted(moved)))),
        ends=sum_of(_host(pid), found),
    )


def _rests_s(pid: int, tid: int, name: str) -> float:
    """Return the number of seconds until a thread's wait times out.

    Raises `_NotAtRest` if an event outside the process could end the wait earlier.
    """
    call, wait = process_stats.call_of(pid, tid), process_stats.wait_of(pid, tid)
    if wait not in (thread_waits.LOCK, thread_waits.TIMED_LOCK):
        raise _NotAtRest(
            f"thread {name} waits in: {wait}" if wait != thread_waits.RUNS else f"thread {name} runs"
        )
    # The thread may have been woken, and then stopped or frozen before it ran.
    if "futex" not in process_stats.queue_of(pid, tid):
        raise _NotAtRest(f"thread {name} is not in the kernel's queue for its lock")
    if wait == thread_waits.LOCK:
        return FOREVER_S
    end = thread_waits.deadline(call, _MACHINE)
    if end is None:
        raise _NotAtRest(f"thread {name} waits until an unknown time")
    address, of_the_wall = end
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # a buffered read would read beyond the stack
        memory.seek(address)
        whole_s, more_ns = _TIME.unpack(memory.read(_TIME.size))
    left_s: float = whole_s + more_ns / 1e9 - (time.time() if of_the_wall else time.monotonic())
    if left_s <= 0:
        raise _NotAtRest(f"the wait of thread {name} has reached its time limit")
    return min(left_s, FOREVER_S)


def _waits_in(pid: int, tid: int) -> int:
    """Return the descriptor that one of gloo's loops waits on.

    Raises `_NotAtRest` if the loop was running at every attempt.
    """
    for _ in range(_POLLS):
        call = process_stats.call_of(pid, tid)
        waiting = thread_waits.of(call, _MACHINE) == process_stats.wait_of(pid, tid) == thread_waits.POLL
        if waiting and "poll" in process_stats.queue_of(pid, tid):
            return int(call.split()[1], 16)
        time.sleep(_POLL_S)
    raise _NotAtRest("a gloo loop is running")


def _watched(pid: int, descriptor: int) -> Iterator[int]:
    """Yield the inodes of the sockets that a loop waits for.

    Pipes and eventfds are skipped, because they stay within the process. Raises `_NotAtRest` for other files.
    """
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines():
        if not line.startswith("tfd:"):
            continue
        target = str(Path(f"/proc/{pid}/fd/{int(line.split()[1])}").readlink())
        if target.startswith("socket:["):
            yield int(target[len("socket:[") : -1])
        elif not target.startswith(("pipe:", "anon_inode:[eventfd]")):
            raise _NotAtRest(f"a gloo loop waits for {target}")


def _quiet(pid: int, watched: set[int]) -> list[Connection]:
    """Return the connections among the sockets `watched`.

    Raises `_NotAtRest` if any of them holds bytes in flight, is changing, or leads to another host.
    """
    if _namespace(pid) != _namespace(os.getpid()):
        raise _NotAtRest("it is in another network namespace")
    listed = tcp_sockets.connections()
    found: list[Connection] = []
    for inode in watched:
        each = listed.get(inode)
        if each is None:
            raise _NotAtRest("a gloo loop waits for a socket that is not TCP")
        if each.state == tcp_sockets.LISTEN:
            if each.unread:  # for a listener, this counts waiting connections, not bytes
                raise _NotAtRest("a process is connecting to it")
            continue
        if each.state != tcp_sockets.ESTABLISHED:
            raise _NotAtRest(f"the connection between {each.local} and {each.remote} is ending")
        if each.unread or each.unsent:
            raise _NotAtRest(f"bytes are in flight between {each.local} and {each.remote}")
        if not each.on_one_host:
            raise _NotAtRest(f"{each.remote} is on another host")
        found.append(each)
    if not 0 < len(found) <= MAX_ENDS:
        raise _NotAtRest(f"its collectives have {len(found)} connections")
    return found


def _no_device(pid: int) -> None:
    """Raise `_NotAtRest` if `pid` has opened a device that might deliver data, such as a GPU or RDMA NIC."""
    folder = f"/proc/{pid}/fd"
    names = os.listdir(folder)  # noqa: PTH208  # in a hot loop
    if len(names) > MAX_FILES:
        raise _NotAtRest(f"it has {len(names)} open files")
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except FileNotFoundError:  # the file was closed after it was listed
            continue
        plain = target in _PLAIN_DEVICES or target.startswith(_PLAIN_FOLDERS)
        if target.startswith("/dev/") and not plain:
            raise _NotAtRest(f"it has opened {target}")


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115


def _host(pid: int) -> str:
    """Return a name for this kernel and network namespace. Addresses are unique within the namespace."""
    return clock.boot_id() + _namespace(pid)
