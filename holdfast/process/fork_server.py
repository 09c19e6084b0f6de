"""Fork processes from a server that has already imported the modules that they need, and detach each fork.

`serve` is the fork server of Holdfast's own parts: the supervisor and the sidecars of a local run. Importing
their modules would cost each of them half a second of CPU time. The fork server has already imported them, so
a killed part restarts quickly.
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
from holdfast.protocol.rank_channel import ForkAction, WorkerMessage, WorkerOrder

GONE_S = 0.1  # how long to wait for ended threads to disappear from the thread list


def forks(
    control: socket.socket, do: ForkAction, parent: int
) -> Iterator[tuple[WorkerOrder, socket.socket, int, list[int]]]:
    """Report whether this process can be forked, and carry out the orders `do` until `control` is closed.

    The iterator yields only in the forks. They become children of `parent`, which is also this process's
    parent. Each fork receives the order and its descriptors: a channel to the sender of the order, a log, and
    any others.
    """
    alone = forkable()
    gc.collect()
    gc.freeze()  # otherwise the collector would write its marks to every page and unshare it after the fork
    rank_channel.send(control, WorkerMessage("ready" if alone else "unforkable", os.getpid()))
    while True:
        try:
            order, descriptors = rank_channel.receive(control, WorkerOrder)
        except rank_channel.Closed:
            return
        if order.do == do and len(descriptors) >= 2 and fork_twice(parent):
            control.close()
            line, log, *more = descriptors
            yield order, socket.socket(fileno=line), log, more
        for each in descriptors:
            os.close(each)


def forkable() -> bool:
    """Return True if only one thread remains in this process after libraries have prepared for a fork.

    OpenBLAS, which NumPy includes, starts a thread for each core on import. It ends these threads before a
    fork and restarts them at the next use (pthread_atfork). This function therefore forks once to see which
    threads remain. If only one thread remains, later forks are safe.
    """
    with warnings.catch_warnings():
        # Since Python 3.12, a fork with running threads causes a warning. It is not needed here, because this
        # function detects the threads itself.
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + GONE_S  # a joined thread may still be listed for a moment
    while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a count, not paths
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def fork_twice(parent: int) -> bool:
    """Fork a grandchild, and return True in it.

    `parent` must be this process's parent and a subreaper: it inherits and reaps the grandchild. If `parent`
    has died and another process inherits the grandchild, the grandchild exits immediately.
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
    """Make standard input empty, redirect standard output and error to `log`, and close `log`."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)


def serve(argv: list[str]) -> list[str]:
    """Carry out orders for parts until the keeper exits. `argv` is `parent control module...`.

    In a fork, this returns the name and arguments of the part that the fork must run. In the server, it
    returns an empty list when the keeper has exited.
    """
    parent, control, *modules = argv
    try:
        linux.end_with_parent(int(parent))
    except linux.ParentGone:
        return []
    title.set_title(title.PARTS_FORK_SERVER)
    for name in modules:
        importlib.import_module(name)
    for order, birth, log, more in forks(socket.socket(fileno=int(control)), "part", int(parent)):
        return _prepared(order, birth, log, more)
    return []


def _prepared(order: WorkerOrder, birth: socket.socket, log: int, inherited: list[int]) -> list[str]:
    """Give this fork the session, output, settings and descriptors of a directly started part."""
    os.setsid()
    redirect(log)
    part, member = order.argv[0], order.settings.get(environment.MEMBER, "")
    linux.set_name(part)
    title.set_title(f"{part} {member}".rstrip())
    os.environ.update(order.settings)
    for name, descriptor in zip(order.inherits, inherited, strict=True):
        os.environ[name] = str(descriptor)
    with birth:
        try:
            rank_channel.send(birth, WorkerMessage("born", os.getpid()))
        except rank_channel.Closed:
            return []  # the keeper no longer waits for this part
    return list(order.argv)
