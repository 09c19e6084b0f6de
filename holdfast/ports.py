"""A TCP port that is held for the next rendezvous, and that nobody else is likely to take."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOW, HIGH = 15_000, 32_000  # below what Linux gives to outgoing connections by default
BACKLOG = 512  # as many ranks may come at once
_TRIES = 64
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def listen(host: str) -> socket.socket:
    """Return a listening socket on a port of its own. Raises `OSError` when the host has none.

    A script that forms its group by itself binds the port again, seconds after this socket was closed for it.
    A port from the range of outgoing connections may have gone to any connection of the machine by then, so
    it is taken from outside of that range as long as one is free there.
    """
    for port in (*_candidates(_outgoing()), 0):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            if port == 0:
                raise
        else:
            return listener
    raise AssertionError("the last port is any that is free")


def _candidates(outgoing: range) -> list[int]:
    """Return some ports in any order, none of which the kernel gives to outgoing connections."""
    # A generator of its own: the script's random numbers are not ours to use, and forks would share a state.
    free = [port for port in range(LOW, HIGH) if port not in outgoing]
    return random.SystemRandom().sample(free, min(_TRIES, len(free)))


def _outgoing() -> range:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return range(32_768, 61_000)
    return range(low, high + 1)
