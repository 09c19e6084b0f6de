"""What it takes to fork a process that has imported a great deal, and to make the child its own."""

from __future__ import annotations

import os
import time
import warnings

GONE_S = 0.1  # for threads that have ended to be gone


def forkable() -> bool:
    """Tell whether one thread exists, once those that know of forks have been put away.

    OpenBLAS, which NumPy brings, has a thread for each core from its import on. It ends them before a fork
    and starts them at the next use (pthread_atfork), so the first fork tells, and those that follow are safe.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads, since Python 3.12: that is what we ask
        child = os.fork()
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + GONE_S  # a thread that was joined may still be listed for a moment
    while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a count, not paths
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def fork_twice(parent: int) -> bool:
    """Return True in a grandchild, which `parent`, ours and a subreaper, has inherited and will reap.

    A grandchild that somebody else inherits, because `parent` has died, ends at once.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        os.sched_yield()
    if os.getppid() != parent:
        os._exit(1)
    return True


def redirect(log: int) -> None:
    """Have nothing to read, and write to `log`, which is closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
