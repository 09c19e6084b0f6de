"""The few Linux calls about processes that Python has no name for."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


class ParentGone(Exception):
    """The process that this one must not outlive had died already."""


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to us when our parent dies.

    Raises `ParentGone` when `parent` is no longer our parent: the signal would never come.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        raise ParentGone(str(parent))


def adopt_orphans() -> None:
    """Make this process the one to which orphans among its descendants are given."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Have `ps` and /proc/PID/comm say `name`, of which the kernel keeps 15 bytes, for this process."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def allow_tracing_by(pid: int) -> None:
    """Let `pid` and its descendants (py-spy) read this process where Yama restricts that."""
    _libc.prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def children() -> list[int]:
    """Return the pids of our own children, zombies included; none when we may open no more files."""
    found: list[int] = []
    try:
        tasks = list(Path("/proc/self/task").iterdir())
    except OSError:
        return []
    for task in tasks:
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except (OSError, ValueError):  # the thread ended, or a kernel without CONFIG_PROC_CHILDREN
            continue
    return found


def state_of(pid: int) -> tuple[str, float]:
    """Return the state letter of `pid` (X when it is gone) and the CPU seconds it has used."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", 0.0
    fields = text[text.rindex(")") + 2 :].split()
    ticks = int(fields[11]) + int(fields[12])  # utime, stime: proc(5)
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signal the process group that `pid` leads, and `pid`; one that is gone is no error."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue
