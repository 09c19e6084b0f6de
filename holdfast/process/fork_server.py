"""Fork processes from one that has imported what they need, and make each fork a process of its own.

`serve` is the fork server of Holdfast's own parts: the supervisor and the sidecars of a local run are forked
from it. What each of them would import, in half a second of a core, it has imported already; a part that is
killed is started again without that.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import time
import warnings
from collections.abc import Iterator

from holdfast.process import linux, title
from holdfast.protocol import environment, rank_channel
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder

GONE_S = 0.1  # for threads that have ended to disappear


def forks(
    control: socket.socket, what: str, parent: int
) -> Iterator[tuple[WorkerOrder, socket.socket, int, list[int]]]:
    """Report whether this process may be forked, and carry out orders for `what` until `control` is closed.

    Yields in the forks only, which are children of `parent`, this process's own: the order, and what came
    with it: a channel to the process that sent it, a log, and further descriptors.
    """
    alone = forkable()
    gc.collect()
    gc.freeze()  # the collector's marks would otherwise unshare every page after the fork
    rank_channel.send(control, WorkerMessage("ready" if alone else "unforkable", os.getpid()))
    while True:
        try:
            order, descriptors = rank_channel.receive(control, WorkerOrder)
        except rank_channel.Closed:
            return
        if order.what == what and len(descriptors) >= 2 and fork_twice(parent):
            control.close()
            line, log, *more = descriptors
            yield order, socket.socket(fileno=line), log, more
        for each in descriptors:
            os.close(each)


def forkable() -> bool:
    """Return True if only one thread exists, after those have ended that libraries end before a fork.

    OpenBLAS, which NumPy brings, has a thread for each core from its import on. It ends them before a fork
    and starts them at the next use (pthread_atfork), so a first fork shows what is left, and later ones are
    safe.
    """
    with warnings.catch_warnings():
        # of forks beside threads, since Python 3.12: this call finds that out
        warnings.simplefilter("ignore")
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
    """Return True in a grandchild, which `parent`, this process's own and a subreaper, inherits and reaps.

    A grandchild that another process inherits, because `parent` has died, ends at once.
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
    """Make standard input empty, and standard output and error the descriptor `log`, which is closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)


def serve(argv: list[str]) -> list[str]:
    """Carry out orders for parts until the keeper is gone. `argv`: `parent control module...`.

    Returns in a fork the name of the part that it must run and its arguments, and at the end an empty list.
    """
    parent, control, *modules = argv
    try:
        linux.end_with_parent(int(parent))
    except linux.ParentGone:
        return []
    title.take(title.PARTS_FORK_SERVER)
    for name in modules:
        importlib.import_module(name)
    for order, birth, log, more in forks(socket.socket(fileno=int(control)), "part", int(parent)):
        return _prepared(order, birth, log, more)
    return []


def _prepared(order: WorkerOrder, birth: socket.socket, log: int, inherited: list[int]) -> list[str]:
    """Give this fork the session, output, settings and descriptors of a part that is started directly."""
    os.setsid()
    redirect(log)
    part, member = order.argv[0], order.settings.get(environment.MEMBER, "")
    linux.set_name(part)
    title.take(f"{part} {member}".rstrip())
    os.environ.update(order.settings)
    for name, descriptor in zip(order.inherits, inherited, strict=True):
        os.environ[name] = str(descriptor)
    with birth:
        try:
            rank_channel.send(birth, WorkerMessage("born", os.getpid()))
        except rank_channel.Closed:
            return []  # the keeper no longer waits for this part
    return list(order.argv)
