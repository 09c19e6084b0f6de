"""What it takes to fork a process that has imported a great deal, and to make the child its own."""

from __future__ import annotations

import gc
import os
import socket
import time
import warnings
from collections.abc import Iterator

from holdfast import channel
from holdfast.channel import Do, Say

GONE_S = 0.1  # for threads that have ended to be gone


def forks(
    control: socket.socket, what: str, parent: int
) -> Iterator[tuple[Do, socket.socket, int, list[int]]]:
    """Say whether this process may be forked, and obey orders for `what` until `control` is closed.

    Yields in the forks only, children of our own `parent`: the order, and what came with it: a line to
    whoever asked, a log, and further descriptors.
    """
    alone = forkable()
    gc.collect()
    gc.freeze()  # the collector's marks would otherwise unshare every page after the fork
    channel.send(control, Say("ready" if alone else "unforkable", os.getpid()))
    while True:
        try:
            order, descriptors = channel.receive(control, Do)
        except channel.Closed:
            return
        if order.what == what and len(descriptors) >= 2 and fork_twice(parent):
            control.close()
            line, log, *more = descriptors
            yield order, socket.socket(fileno=line), log, more
        for each in descriptors:
            os.close(each)


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
