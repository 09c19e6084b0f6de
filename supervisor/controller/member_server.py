"""The members' lines: the newest report of each, and the newest order that each has been sent."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web

from holdfast.process import clock as hostclock
from holdfast.protocol import codec
from holdfast.protocol.member_messages import PROTOCOL, MemberOrder, MemberReport
from supervisor.view import member_clocks
from supervisor.view.member_clocks import ClockOffset

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
MOST_CAUSES = 64  # for refusals that are remembered
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class MemberConnection:
    """One member's connection, or the memory of it."""

    member: str
    report: MemberReport | None = None
    connected: bool = False
    heard_ns: int = 0
    first_ns: int = 0  # when it was heard for the first time
    well_ns: int = 0  # when it last told of a launcher that answers
    order: MemberOrder | None = None
    sent: MemberOrder | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    offset: ClockOffset = field(default_factory=ClockOffset)  # of its clock
    owner: object = None  # the socket that speaks for the member now


class MemberServer:
    """All lines of one run."""

    def __init__(
        self, now_ns: Callable[[], int], changed: Callable[[], None], clock: str | None = None
    ) -> None:
        """`clock` says whose `now_ns` is; that of this process by default."""
        self._now_ns = now_ns
        self._clock = hostclock.identity() if clock is None else clock
        self._changed = changed
        self.connections: dict[str, MemberConnection] = {}
        self._refused: set[str] = set()  # causes that were logged

    def connection(self, member: str) -> MemberConnection:
        if member not in self.connections:
            self.connections[member] = MemberConnection(member, heard_ns=self._now_ns())
        return self.connections[member]

    def discount_own_pause(self, late_ns: int) -> None:
        """Do not count as silence what we could not hear, because we ourselves did not run."""
        for line in self.connections.values():
            line.heard_ns = min(self._now_ns(), line.heard_ns + late_ns)

    def order(self, member: str, order: MemberOrder) -> None:
        """Send `order` unless it is what the member has been sent already."""
        line = self.connection(member)
        if line.order != order:
            line.order = order
            line.changed.set()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Speak with one member until its line breaks. A second line replaces the first."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=codec.MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        line: MemberConnection | None = None
        sender: asyncio.Task[None] | None = None
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                report = self._read(message.data)
                if report is None:
                    break
                if line is None:
                    line = self.connection(report.member)
                    line.owner, line.sent = socket, None
                    line.changed.set()
                    sender = asyncio.create_task(self._send(socket, line))
                if line.owner is not socket or report.member != line.member:
                    break
                self._take(line, report)
                self._changed()
        finally:
            if sender is not None:
                sender.cancel()
            if line is not None and line.owner is socket:
                line.connected = False
                self._changed()
        return socket

    def _take(self, line: MemberConnection, report: MemberReport) -> None:
        now_ns = self._now_ns()
        line.offset = line.offset.heard(report, self._clock, now_ns)
        line.report, line.connected, line.heard_ns = (
            member_clocks.on_supervisor_clock(report, line.offset),
            True,
            now_ns,
        )
        line.first_ns = line.first_ns or now_ns
        if report.launcher is not None and not report.launcher_silent:
            line.well_ns = now_ns

    def _read(self, data: str) -> MemberReport | None:
        try:
            report = codec.decode(MemberReport, data)
        except codec.InvalidMessage as error:
            self._refuse(str(error))
            return None
        if report.protocol != PROTOCOL:
            self._refuse(f"protocol {report.protocol}")
            return None
        return report

    def _refuse(self, why: str) -> None:
        """Say so once for each cause: a member that is refused comes again many times a second."""
        cause = _NUMBER.sub("", why)
        if cause not in self._refused:
            self._refused = {*self._refused, cause} if len(self._refused) < MOST_CAUSES else {cause}
            log.warning("report refused", extra={"error": why})

    async def _send(self, socket: web.WebSocketResponse, line: MemberConnection) -> None:
        while True:
            await line.changed.wait()
            if line.owner is not socket:  # half open: what is told here, the line that replaced it would miss
                return
            line.changed.clear()
            if line.order is not None and line.order is not line.sent:
                line.sent = line.order
                try:
                    await socket.send_str(codec.encode(line.order).decode())
                except ConnectionError:
                    return
