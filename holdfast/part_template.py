"""The template of our own parts: the supervisor and the sidecars of a local run are forked from it.

What each of them would import, in half a second of a core, it has; one that is killed is back without that.
"""

from __future__ import annotations

import importlib
import os
import socket

from holdfast import channel, forking, osproc
from holdfast.channel import Do, Say


def serve(argv: list[str]) -> list[str]:
    """Serve orders for parts until the keeper is gone: `parent control module...`.

    Returns in a fork what it is to be, the name of a part and its arguments, and nothing at the end.
    """
    parent, control, *modules = argv
    try:
        osproc.die_with(int(parent))
    except osproc.ParentGone:
        return []
    for name in modules:
        importlib.import_module(name)
    for order, birth, log, more in forking.forks(socket.socket(fileno=int(control)), "part", int(parent)):
        return _prepared(order, birth, log, more)
    return []


def _prepared(order: Do, birth: socket.socket, log: int, inherited: list[int]) -> list[str]:
    """Make this process what one is that was started as the part, with its settings and descriptors."""
    os.setsid()
    forking.redirect(log)
    osproc.set_name(order.argv[0])
    os.environ.update(order.settings)
    for name, descriptor in zip(order.inherits, inherited, strict=True):
        os.environ[name] = str(descriptor)
    with birth:
        try:
            channel.send(birth, Say("born", os.getpid()))
        except channel.Closed:
            return []  # the keeper has not waited for us
    return list(order.argv)
