"""Connect the sidecar to its launcher over a unix socket, and to the supervisor over a WebSocket."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import SHUT_RDWR
from typing import TypeAlias

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from holdfast.fileio import folder_rights
from holdfast.launcher import sidecar_server
from holdfast.process import event_loop, network
from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from holdfast.protocol.member_messages import (
    CLUSTER_PING_S,
    FEATURES,
    MEMBER_PATH,
    MUST_CONFIRM,
    MUST_REACH,
    NEIGHBOURS,
    PING_S,
    UPDATES,
    MemberOrder,
    MemberReport,
)
from sidecar.report_updates import ReportWriter

log = logging.getLogger(__name__)

_Socket: TypeAlias = "aiohttp.ClientWebSocketResponse[bool]"

LAUNCHER_RETRY_S = 0.02
BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_NUMBER = re.compile(r"\d+")
ANSWER_S = 20.0  # the limit for the answer, which may have to wait until the token has been reviewed
BRIEF_S = 1.0  # a connection that ends sooner is treated as a failure
# The limit for connecting to the supervisor. In this time, the kernel resends its packet once, after 1 s. It
# would resend the packet again only 2 s later, so after a network outage, a new attempt is faster.
CONNECT_S = 2.0
UNREACHABLE_S = 5.0  # on a cluster, a connection ends if the supervisor's host is silent for this long
# On a cluster, the sidecar looks for another supervisor if the host of this one is silent for this long. The
# other supervisor takes over a little later (see docs/adr/0020), so the members are there when it does. If
# the network fails only briefly, this costs a TLS handshake.
SILENT_S = 2.0
RESOLVE_S = 0.5  # if DNS does not answer within this time, the last known addresses are tried


class LauncherClient:
    """Receives the launcher's state and sends it orders.

    `state` is the newest state, or None while there is no connection. `unreachable` says why there is no
    connection. It is "" while there is one, and also if the launcher is not listening yet or has ended.
    """

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self._path = path
        self._changed = changed
        self._writer: asyncio.StreamWriter | None = None
        self.state: LauncherState | None = None
        self.heard_s = 0.0  # when the launcher's last message arrived, by CLOCK_MONOTONIC; 0 if not connected
        self.unreachable = ""
        self._refused = ""  # why the last state was refused; "" if it was accepted

    async def run(self) -> None:
        """Read states from the launcher, and reconnect whenever the connection ends, until cancelled."""
        while True:
            try:
                await self._connect()
            except ValueError:  # raised by `readline` if a line exceeds the limit
                self._refuse(f"a state of more than {codec.MAX_MESSAGE_BYTES:,} bytes")
            except FileNotFoundError:  # the launcher is not listening yet, or has ended
                self.unreachable = ""
            except OSError as error:
                self._note_unreachable(self._why(error))
            if self.state is not None:
                self.state = None
                self._changed()
            await asyncio.sleep(LAUNCHER_RETRY_S)

    async def _connect(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._path), limit=codec.MAX_MESSAGE_BYTES)
        self._writer, self.heard_s, self.unreachable = writer, time.monotonic(), ""
        try:
            await self._listen(reader)
        finally:
            self._writer, self.heard_s = None, 0.0
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self.heard_s = time.monotonic()
            if line == sidecar_server.HEARTBEAT:
                continue
            try:
                self.state = codec.decode(LauncherState, line)
            except codec.InvalidMessage as error:
                self._refuse(str(error))
                return
            self._refused = ""
            self._changed()

    def _note_unreachable(self, why: str) -> None:
        if why != self.unreachable:
            self.unreachable = why
            self._changed()

    def _why(self, error: OSError) -> str:
        if isinstance(error, ConnectionRefusedError):
            return f"no process listens on {self._path}: its launcher was killed, or is no longer running"
        why = f"the sidecar cannot connect to {self._path}: {error.strerror or error}"
        return f"{why} ({folder_rights.denial(self._path)})" if isinstance(error, PermissionError) else why

    def _refuse(self, why: str) -> None:
        """Log each reason for a refusal only once, because the client reconnects many times a second."""
        cause = _NUMBER.sub("", why)  # without the offset in the line, which differs each time
        if cause != self._refused:
            self._refused = cause
            log.warning("launcher refused", extra={"error": why})

    def send(self, order: LauncherOrder) -> None:
        """Send an order. It can get lost, so repeat it until the launcher's state reflects it."""
        if self._writer is not None:
            self._writer.write(codec.encode(order))


class AddressesInTurn(AbstractResolver):
    """Resolves a name to all of its addresses, and puts the next one first after each `skip`.

    The C library always sorts a name's addresses the same way, and a client connects to the first one that
    accepts. Without this class, it could reach the same non-leading replica every time.

    If a lookup fails or takes longer than `RESOLVE_S`, the addresses that were found last are used. The C
    library repeats a lost request only after 5 s, and the DNS server itself may be on a lost node.
    """

    def __init__(self, resolver: AbstractResolver | None = None) -> None:
        self._resolver = resolver if resolver is not None else aiohttp.ThreadedResolver()
        self._turn = 0
        self._known: list[ResolveResult] = []
        self._lookup: asyncio.Future[list[ResolveResult]] | None = None  # the latest; it may be under way

    def skip(self) -> None:
        """Begin with the next address from now on."""
        self._turn += 1

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        if self._lookup is None or self._lookup.done():  # at most one, because each occupies a thread
            self._lookup = asyncio.ensure_future(self._resolver.resolve(host, port, family))
            self._lookup.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            limit_s = RESOLVE_S if self._known else None
            self._known = await asyncio.wait_for(asyncio.shield(self._lookup), limit_s)
        except (OSError, asyncio.TimeoutError):
            if not self._known:
                raise
        found = sorted(self._known, key=lambda each: each["host"])
        first = self._turn % len(found) if found else 0
        return found[first:] + found[:first]

    async def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
        await self._resolver.close()


class SupervisorClient:
    """Sends a report to the supervisor after each change, and passes the supervisor's orders to `obey`.

    Set `dirty` to request a report. If nothing changes, it still sends a report every `interval_s`.

    `alone_since_s` is the CLOCK_MONOTONIC time since which no supervisor has given orders. `obey` sets it to
    None when it accepts an order, because a connection alone does not prove that the supervisor leads.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str],
        report: Callable[[], MemberReport],
        obey: Callable[[MemberOrder], Awaitable[None]],
        interval_s: float,
        tls: ssl.SSLContext | None = None,
        unreadable: Callable[[str, str], None] = lambda text, why: None,
    ) -> None:
        """`token` is called for every connection, because a pod's token is replaced while the pod runs.

        `tls` verifies the supervisor if its URL begins with https. `unreadable` is called with each message
        that is not a valid order, and the reason.
        """
        self._tls = tls
        self._unreadable = unreadable
        self._url = url
        self._token = token
        self._report = report
        self._obey = obey
        self._interval_s = interval_s
        self.dirty = asyncio.Event()
        self.alone_since_s: float | None = time.monotonic()
        self.connections = 0  # how many connections there have been so far

    async def run(self) -> None:
        """Stay connected until cancelled. Losing the connection does not affect the ranks."""
        failures = 0
        # Do not cache addresses: a new supervisor pod has a new address, and the old address may never refuse
        # a connection.
        addresses = AddressesInTurn()
        # Do not reuse a connection to a replica that has refused, because then its address would not be
        # skipped.
        connector = aiohttp.TCPConnector(use_dns_cache=False, resolver=addresses, force_close=True)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=limits) as session:
            while True:
                begun_s = None
                try:
                    connecting = session.ws_connect(
                        self._url + MEMBER_PATH,
                        headers={
                            "Authorization": f"Bearer {self._token()}",
                            FEATURES: f"{NEIGHBOURS} {MUST_REACH} {MUST_CONFIRM}",
                        },
                        protocols=(UPDATES,),
                        heartbeat=PING_S if self._tls is None else CLUSTER_PING_S,
                        max_msg_size=codec.MAX_MESSAGE_BYTES,
                        ssl=self._tls or True,
                    )
                    socket = await asyncio.wait_for(connecting, ANSWER_S)
                    raw = socket.get_extra_info("socket") if self._tls is not None else None
                    if raw is not None:
                        network.end_if_unreachable(raw, UNREACHABLE_S)
                    begun_s = time.monotonic()
                    self.connections += 1
                    try:
                        await self._talk(socket, raw)
                    finally:
                        if self.alone_since_s is None:
                            self.alone_since_s = time.monotonic()
                        await socket.close()
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                    pass
                # A supervisor that refuses the first report ends the connection without an error.
                if begun_s is None or time.monotonic() - begun_s < BRIEF_S:
                    failures += 1
                    addresses.skip()
                else:
                    failures = 0
                await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])

    async def _talk(self, socket: _Socket, raw: socket.socket | None) -> None:
        """Send reports and receive orders until one of the two ends; re-raise its error.

        If `raw` is given, it is the TCP connection, and this ends when its other host falls silent.
        """
        both = {asyncio.create_task(self._speak(socket, raw)), asyncio.create_task(self._listen(socket))}
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await event_loop.end(both)
        # Retrieve both exceptions: asyncio logs an unretrieved one with a traceback, and the second exception
        # is usually about the same lost connection.
        errors = [task.exception() for task in (*done, *(both - done)) if not task.cancelled()]
        for error in filter(None, errors):
            raise error

    async def _listen(self, socket: _Socket) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            try:
                order = codec.decode(MemberOrder, message.data)
            except codec.InvalidMessage as error:
                log.error("order not readable", extra={"error": str(error)})
                self._unreadable(message.data, str(error))
                continue
            await self._obey(order)

    async def _speak(self, socket: _Socket, raw: socket.socket | None) -> None:
        writer = ReportWriter(updates=socket.protocol == UPDATES)
        while True:
            self.dirty.clear()
            await socket.send_str(writer.text(self._report()))
            await event_loop.set_within(self.dirty, seconds_to_next_tick(self._interval_s))
            if raw is not None and network.unanswered_s(raw) >= SILENT_S:
                raw.shutdown(SHUT_RDWR)  # otherwise, the WebSocket would wait for the other side to close it
                raise ConnectionResetError("the supervisor's host does not answer")
