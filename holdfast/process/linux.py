"""The few Linux calls for processes that Python does not provide."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

LOWEST_PRIORITY = 19  # the nice value
PAUSE_S = 0.002  # the time between two checks of whether a killed process has exited

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_FLAGS, _EXIT_CODE = 6, 49  # indices of fields of /proc/PID/stat, where the state is field 0: proc(5)
_STAT_BYTES = 4096  # /proc/PID/stat is shorter
_EXITING = 0x4  # a bit in the flags: include/linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


class ParentGone(Exception):
    """The parent that this process must not outlive has already died."""


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send `signum` to this process when its parent dies.

    The signal may arrive several times, once for each thread of the parent. Raises `ParentGone` if `parent`
    is no longer the parent, because the signal would then never arrive.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        raise ParentGone(str(parent))


def outlive_parent() -> None:
    """Undo `end_with_parent`: this process then keeps running when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process a subreaper, which adopts any descendant whose parent exits."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Set the short name of this process (/proc/PID/comm) to the first 15 bytes of `name`.

    `holdfast.process.title` sets the command line that `ps` shows.
    """
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def allow_tracing_by(pid: int) -> None:
    """Allow `pid` and its descendants, such as py-spy, to read this process where Yama restricts that."""
    _libc.prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def lower_thread_priority() -> None:
    """Give the calling thread, and threads that it starts later, the lowest priority. Raises `OSError`."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def children() -> list[int]:
    """Return the pids of this process's children, including zombies; [] if no more files can be opened."""
    found: list[int] = []
    try:
        tasks = list(Path("/proc/self/task").iterdir())
    except OSError:
        return []
    for task in tasks:
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except (OSError, ValueError):  # the thread has ended, or the kernel lacks CONFIG_PROC_CHILDREN
            continue
    return found


def collected(pid: int) -> int | None:
    """Reap `pid`, a child that has exited, and return its wait status. Never waits.

    Returns None if `pid` has not ended or is not a child. If a debugger traces the child, the kernel reports
    the end to the debugger first. The status is then returned, but the child must be reaped later.
    """
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found else status_of_dead(pid)


def collect_killed(pid: int, limit_s: float) -> None:
    """Reap a killed child, waiting up to `limit_s` for it to exit."""
    give_up_at = time.monotonic() + limit_s
    while collected(pid) is None and state_of(pid)[0] != "X" and time.monotonic() < give_up_at:
        time.sleep(PAUSE_S)


def status_of_dead(pid: int) -> int | None:
    """Return the wait status of a process that has exited but has not been reaped; otherwise None."""
    fields = _stat(pid)
    return int(fields[_EXIT_CODE]) if fields[:1] == ["Z"] and len(fields) > _EXIT_CODE else None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV, or "signal 40" if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def state_of(pid: int) -> tuple[str, float]:
    """Return the state letter of `pid` (X if it does not exist) and the CPU seconds it has used."""
    fields = _stat(pid)
    if not fields:
        return "X", 0.0
    ticks = int(fields[11]) + int(fields[12])  # utime, stime: proc(5)
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")


def is_able(pid: int) -> bool:
    """Return whether `pid` is alive, and neither exiting nor stopped."""
    fields = _stat(pid)
    return len(fields) > _FLAGS and fields[0] in "RSD" and not int(fields[_FLAGS]) & _EXITING


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the state; [] if there is no such process."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, _STAT_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return []
    return text[text.rindex(b")") + 2 :].decode().split()


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signal the process group that `pid` leads, or `pid` if there is no group. Ignore missing processes.

    SIGKILL is sent to both. Any other signal is sent only once, because a handler would otherwise run twice.
    """
    for send in (os.killpg, os.kill):
        try:
            send(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue
        if signum != signal.SIGKILL:
            return
