"""The template of our own parts: the supervisor and the sidecars of a local run are forked from it.

What each of them would import, in half a second of a core, it has; one that is killed is back without that.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

from holdfast import channel, forking, osproc, parts
from holdfast.channel import Do, Say


def main(argv: list[str]) -> int:
    """Serve orders for parts until the keeper is gone: `parent control module...`."""
    parent, control, *modules = argv
    try:
        osproc.die_with(int(parent))
    except osproc.ParentGone:
        return 1
    for name in modules:
        importlib.import_module(name)
    for order, birth, log, more in forking.forks(socket.socket(fileno=int(control)), "part", int(parent)):
        return _be_part(order, birth, log, more)
    return 0


def _be_part(order: Do, birth: socket.socket, log: int, inherited: list[int]) -> int:
    """Become the part, as if it had been started with that environment and these descriptors."""
    os.setsid()
    forking.redirect(log)
    part, *args = order.argv
    osproc.call_us(part)
    os.environ.update(order.settings)
    for name, descriptor in zip(order.inherits, inherited, strict=True):
        os.environ[name] = str(descriptor)
    try:
        channel.send(birth, Say("born", os.getpid()))
    except channel.Closed:
        return 1  # the keeper has not waited for us
    birth.close()
    code = parts.run(part, args)
    sys.stderr.flush()
    return code
