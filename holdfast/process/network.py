"""TCP servers: a port reserved for the next rendezvous, the run's token, and a limit on idle connections.

Any process that can reach a server's address can open connections. Each connection takes up a descriptor that
the run may need for files or members. A connection is idle while the server is not answering a request on it.
`Door` allows `MOST` idle connections, and closes the oldest to make room for a new one. A connection may stay
idle only as long as a request's headers may take, unless it has presented the token once.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from holdfast.process import event_loop

LOW, HIGH = 15_000, 32_000  # below Linux's default range for outgoing connections
BACKLOG = 512  # the number of ranks that may connect at the same time
_TRIES = 64
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

MOST = 32  # idle connections per server
IDLE_S = 5.0
# The limit on connections accepted together, so that few are open before `Door` has counted them.
SERVER_BACKLOG = 16
# The limit on a TLS handshake. When all members of a cluster connect to a new supervisor, each waits for the
# handshakes of the others.
HANDSHAKE_S = 15.0
ACCEPTED_TOGETHER = 64  # the number of connections accepted before the event loop does other work
RETRY_S = 0.1  # the pause after a failure to accept a connection, for example because no descriptor is left
# The kernel resends unanswered data after 0.2 s, and then waits twice as long each time.
RESENT = 2
# positions in Linux's `struct tcp_info`: how often the oldest data was sent again, and how many milliseconds
# have passed since the last acknowledgement
_RETRANSMITS, _LAST_ACK_MS, _INFO_BYTES = 2, 56, 60
# The discard port, which today's hosts do not serve. A host whose kernel runs refuses a connection to it.
UNUSED_PORT = 9
# Errors of an attempt to connect that come from neighbours of the host, or from a router that has lost the
# route to it. They are not answers of the host.
NO_ANSWER = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT)
_POLL_S = 1.0
_NEW_S = 1.0  # a new connection may lack a transport for this long

P = TypeVar("P", bound=asyncio.Protocol)


def listen(host: str) -> socket.socket:
    """Return a listening socket on an unused port. Raises `OSError` if none is free.

    A port outside the ephemeral range is preferred. If a script forms its own group, this socket is closed
    and the script binds the port again seconds later. In the meantime, an outgoing connection of the machine
    could take any port of the ephemeral range.
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
    raise AssertionError("port 0 binds any free port")


def listen_everywhere(port: int, backlog: int) -> socket.socket:
    """Return a non-blocking socket that listens on `port` of all addresses. Raises `OSError`."""
    try:
        listener = socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    except (OSError, ValueError):  # the host has no IPv6
        listener = socket.create_server(("", port), backlog=backlog)
    listener.setblocking(False)
    return listener


def end_if_unreachable(connection: socket.socket, after_s: float) -> None:
    """End a TCP connection with an error if its other host has not answered for about `after_s`.

    The kernel gives up on data that is not acknowledged for that long, and sends probes if there is no data
    to send. Without this limit, a connection to a host that has lost power ends only after a quarter of an
    hour, and the kernel waits longer and longer before it resends data, even after the network is back. A
    stopped process at the other end does not end the connection, because its kernel answers while it has room
    for the data.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    interval_s = max(1, int(after_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(after_s * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(after_s / 2)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def unanswered_s(connection: socket.socket) -> float:
    """Return for how many seconds the other host has not answered, although data was sent to it repeatedly.

    Returns 0.0 if it has answered, or if this is unknown. A stopped process at the other end does not count,
    because its kernel answers.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES or info[_RETRANSMITS] < RESENT:
        return 0.0
    return float(int.from_bytes(info[_LAST_ACK_MS:_INFO_BYTES], sys.byteorder)) / 1000


def _candidates(outgoing: range) -> list[int]:
    """Return some ports, in random order, that the kernel does not assign to outgoing connections."""
    # Use a separate generator, because this must not change the script's random numbers, and because forks
    # share the state of the common generator.
    free = [port for port in range(LOW, HIGH) if port not in outgoing]
    return random.SystemRandom().sample(free, min(_TRIES, len(free)))


def _outgoing() -> range:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return range(32_768, 61_000)
    return range(low, high + 1)


def bearer_token(header: str) -> str:
    """Return the token in an Authorization header; "" if it contains none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def has_token(authorization: str, token: str) -> bool:
    """Return whether the value of an Authorization header is `Bearer`, followed by the run's token.

    The duration of the comparison does not depend on where the two tokens differ.
    """
    return hmac.compare_digest(authorization.encode(errors="replace"), f"Bearer {token}".encode())


class Door:
    """Closes idle connections of a server, on its event loop.

    As in aiohttp, the protocol of each connection must have an attribute `transport`.
    """

    def __init__(self, most: int = MOST, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._idle: dict[asyncio.Protocol, float] = {}  # when each connection became idle, oldest first
        self._trusted: set[asyncio.Protocol] = set()
        self._busy: set[asyncio.Protocol] = set()  # connections with a request that is being answered
        self._has_come = asyncio.Event()  # set when there may be connections to watch

    def guarded(self, make: Callable[[], P]) -> Callable[[], P]:
        """Return a protocol factory for `create_server` that calls `make` and watches each connection."""

        def made() -> P:
            self._make_room()
            connection = make()
            self._note_idle(connection)
            return connection

        return made

    async def accept(
        self, listener: socket.socket, make: Callable[[], P], tls: ssl.SSLContext | None
    ) -> NoReturn:
        """Accept connections on the non-blocking `listener` until cancelled, and watch those that are idle.

        `make` creates the protocol of a connection. A connection whose TLS handshake is not complete has no
        transport yet, so `guarded` could not close it. The limit on idle connections also applies to
        handshakes in progress: the oldest is closed to make room for a new connection.
        """
        loop = asyncio.get_running_loop()
        handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        try:
            while True:
                for _ in range(ACCEPTED_TOGETHER):
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError:
                        await asyncio.sleep(RETRY_S)
                        continue
                    if len(handshakes) >= self._most:
                        oldest = next(iter(handshakes))
                        del handshakes[oldest]
                        oldest.cancel()
                    task = asyncio.create_task(self._begin(connection, make, tls))
                    handshakes[task] = None
                    task.add_done_callback(lambda done: handshakes.pop(done, None))
                await asyncio.sleep(0)
        finally:
            await event_loop.end(handshakes)

    async def _begin(
        self, connection: socket.socket, make: Callable[[], P], tls: ssl.SSLContext | None
    ) -> None:
        """Complete the handshake of a connection, then watch the connection."""
        loop = asyncio.get_running_loop()
        limit_s = HANDSHAKE_S if tls is not None else None
        try:
            _, protocol = await loop.connect_accepted_socket(
                make, connection, ssl=tls, ssl_handshake_timeout=limit_s
            )
        except OSError:  # the peer is not a TLS client, has left, or is too slow
            connection.close()
            return
        if protocol not in self._busy and protocol not in self._trusted:  # its request may have arrived
            self._make_room()
            self._note_idle(protocol)

    @contextmanager
    def answering(self, connection: asyncio.Protocol | None, *, trusted: bool = False) -> Iterator[None]:
        """Mark `connection` as not idle while the block answers a request on it.

        With `trusted`, the connection may then stay open indefinitely.
        """
        if connection is None:  # the connection has closed in the meantime
            yield
            return
        self._idle.pop(connection, None)
        self._busy.add(connection)
        if trusted:
            self._trusted.add(connection)
            self._has_come.set()
        try:
            yield
        finally:
            self._busy.discard(connection)
            if connection not in self._trusted and _is_open(connection):
                self._note_idle(connection)

    async def watch(self) -> None:
        """Close connections that have been idle for too long. Sleep while there are none."""
        while True:
            if not self._idle and not self._trusted:
                self._has_come.clear()
                await self._has_come.wait()
            await asyncio.sleep(_POLL_S)
            self.sweep(time.monotonic())

    def _note_idle(self, connection: asyncio.Protocol) -> None:
        self._idle[connection] = time.monotonic()
        self._has_come.set()

    def sweep(self, now_s: float) -> None:
        """Close connections that have been idle for too long at `now_s`, and forget those that are closed."""
        for connection, since_s in tuple(self._idle.items()):
            if not _is_open(connection):
                if now_s - since_s > _NEW_S:
                    del self._idle[connection]
            elif now_s - since_s > self._idle_s:
                self._close(connection)
        self._trusted = {each for each in self._trusted if _is_open(each)}

    def _make_room(self) -> None:
        if len(self._idle) >= self._most:
            self.sweep(time.monotonic())
        while len(self._idle) >= self._most:
            self._close(next(iter(self._idle)))

    def _close(self, connection: asyncio.Protocol) -> None:
        del self._idle[connection]
        transport: asyncio.Transport | None = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()


def _is_open(connection: asyncio.Protocol) -> bool:
    transport: asyncio.Transport | None = getattr(connection, "transport", None)
    return transport is not None and not transport.is_closing()
