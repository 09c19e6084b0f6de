"""Classify a thread's wait by its system call. Pure.

The kernel shows the number and the arguments of the call in /proc/PID/task/TID/syscall. The classes separate
waits that an outside event can end from waits that only the process itself can end. Only a wait for a private
lock is of the second kind, because no other process can release such a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RUNS = "run"
LOCK = "lock"  # private to the process and without a time limit, so only its own threads can end the wait
TIMED_LOCK = "lock for a time"  # a private lock, but the thread will run again and may then wake others
# A wait for a private lock in a process with a signal handler that could release it.
SIGNALLED_LOCK = "lock that a signal handler may release"
SHARED_LOCK = "shared lock"  # another process can release the lock
SLEEP = "sleep"
POLL = "poll"
FILE = "file"
NETWORK = "network"
ACCEPT = "connection"  # for others to connect: a server without requests, which does no work
CHILD = "child"
OTHER = "other"
UNKNOWN = "unknown"  # the kernel does not show the call, or not to this process

_PRIVATE = 0x80  # FUTEX_PRIVATE_FLAG: include/uapi/linux/futex.h
_REALTIME = 0x100  # FUTEX_CLOCK_REALTIME
# FUTEX_WAIT_BITSET. Its time argument is a deadline; other operations have a duration instead.
_WAIT_BITSET = 9
_FUTEX = {"x86_64": 202, "aarch64": 98}
_SELECT = {"x86_64": (23, 270), "aarch64": (72,)}
_CALLS: Mapping[str, Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "x86_64": {
            SLEEP: (35, 230),  # nanosleep, clock_nanosleep
            POLL: (7, 23, 232, 270, 271, 281, 441),  # poll, select, epoll_wait and variants of them
            # read, write, open, stat, pread64, fsync, fallocate and variants of them
            FILE: (
                *(0, 1, 2, 3, 4, 5, 6, 17, 18, 19, 20, 40, 73, 74, 75, 76, 77, 78, 79, 82, 83, 84, 87),
                *(217, 257, 262, 263, 264, 277, 285, 295, 296, 306, 316, 326, 332),
            ),
            NETWORK: (42, 44, 45, 46, 47, 299, 307),
            ACCEPT: (43, 288),
            CHILD: (61, 247),
        },
        "aarch64": {
            SLEEP: (101, 115),
            POLL: (22, 72, 73, 441),
            FILE: (
                *(32, 34, 35, 38, 43, 44, 45, 46, 47, 48, 56, 57, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70),
                *(71, 78, 79, 80, 81, 82, 83, 84, 267, 276, 285, 291),
            ),
            NETWORK: (203, 206, 207, 211, 212, 243, 269),
            ACCEPT: (202, 242),
            CHILD: (95, 260),
        },
    }
)

# Signals whose handlers can never resolve a hang: crashes (which faulthandler catches), requests to end the
# process (such as SIGINT, which Python catches), the terminal's signals, CPU-time timers (a wait uses no CPU
# time), and the two signals that the C library reserves for its threads.
_ENDS_NO_WAIT = frozenset(
    {
        *(4, 5, 6, 7, 8, 11, 31, 13, 24, 25),  # ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS, PIPE, XCPU, XFSZ
        *(2, 15, 3, 1),  # INT, TERM, QUIT, HUP
        *(20, 21, 22, 18, 28),  # TSTP, TTIN, TTOU, CONT, WINCH
        *(26, 27),  # VTALRM, PROF
        *(32, 33),
    }
)
_CHILD_ENDED = 17  # CHLD


def may_be_ended(caught: int, children: bool) -> bool:
    """Return True if a signal handler could end a wait of the main thread.

    `caught` is the mask SigCgt of /proc/PID/status. `children` is True if the process has children other than
    data loaders, for which SIGCHLD could arrive. A handler for SIGCHLD alone proves nothing, because torch
    installs one for its data loaders and never removes it.
    """
    found = {number for number in range(1, 65) if caught >> (number - 1) & 1} - _ENDS_NO_WAIT
    return bool(found if children else found - {_CHILD_ENDED})


def deadline(syscall: str, machine: str) -> tuple[int, bool] | None:
    """Return the memory address of the deadline of a thread's `TIMED_LOCK`, and the deadline's clock.

    The clock is True for the wall clock and False for the monotonic clock. Returns None for any other wait,
    and for a wait with a duration instead of a deadline, because it is not known when that wait started.
    """
    if of(syscall, machine) != TIMED_LOCK:
        return None
    operation, address = (int(word, 16) for word in (syscall.split()[2], syscall.split()[4]))
    if operation & ~(_PRIVATE | _REALTIME) != _WAIT_BITSET:
        return None
    return address, bool(operation & _REALTIME)


def of(syscall: str, machine: str) -> str:
    """Return the kind of wait that a line of /proc/PID/task/TID/syscall shows; UNKNOWN for any other text."""
    words = syscall.split()
    if words[:1] == ["running"]:
        return RUNS
    try:
        number = int(words[0])
        arguments = [int(word, 16) for word in words[1:7]]
    except (IndexError, ValueError):
        return UNKNOWN
    if number == _FUTEX.get(machine) and len(arguments) >= 4:
        if not arguments[1] & _PRIVATE:
            return SHARED_LOCK
        return TIMED_LOCK if arguments[3] else LOCK
    if number in _SELECT.get(machine, ()) and len(arguments) >= 5 and not arguments[0] and arguments[4]:
        return SLEEP  # a select without descriptors: before Python 3.11, `time.sleep` uses it
    for name, numbers in _CALLS.get(machine, {}).items():
        if number in numbers:
            return name
    return OTHER if machine in _CALLS else UNKNOWN
