"""Serve the members' connections: receive each member's reports and send its orders."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from aiohttp import WSMsgType, web

from holdfast.process import clock as hostclock
from holdfast.protocol import codec
from holdfast.protocol.member_messages import PROTOCOL, MemberOrder, MemberReport
from supervisor.view import member_clocks
from supervisor.view.member_clocks import ClockOffset

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
MAX_CAUSES = 64  # causes of refusals that are remembered, so that each is logged once
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class MemberConnection:
    """The connection of one member; while it is broken, its last values."""

    member: str
    report: MemberReport | None = None  # the newest one
    connected: bool = False
    heard_ns: int = 0  # when the last report arrived
    first_ns: int = 0  # when the first report arrived; 0: there was none
    well_ns: int = 0  # when the member last reported a launcher that responds
    order: MemberOrder | None = None  # the newest one
    sent: MemberOrder | None = None  # the last one that was sent on the present socket
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    offset: ClockOffset = field(default_factory=ClockOffset)  # of the member's clock from the supervisor's
    owner: object = None  # the newest socket of the member: older ones are ignored


class MemberServer:
    """The connections of all members of one run."""

    def __init__(
        self, now_ns: Callable[[], int], changed: Callable[[], None], clock: str | None = None
    ) -> None:
        """`changed` is called after each report and disconnection. `clock` identifies the clock of `now_ns`;
        by default, it is the clock of this host."""
        self._now_ns = now_ns
        self._clock = hostclock.identity() if clock is None else clock
        self._changed = changed
        self.connections: dict[str, MemberConnection] = {}
        self.has_heard = False  # whether any member has reported
        self._refused: set[str] = set()  # the causes of refusals that were logged

    def connection(self, member: str) -> MemberConnection:
        if member not in self.connections:
            self.connections[member] = MemberConnection(member, heard_ns=self._now_ns())
        return self.connections[member]

    def discount_own_pause(self, late_ns: int) -> None:
        """Exclude from members' silence the `late_ns` during which this process did not run."""
        for line in self.connections.values():
            line.heard_ns = min(self._now_ns(), line.heard_ns + late_ns)

    def order(self, member: str, order: MemberOrder) -> None:
        """Send `order` to a member, now or once it connects; an order that it already has is not repeated."""
        line = self.connection(member)
        if line.order != order:
            line.order = order
            line.changed.set()

    async def serve(
        self, request: web.Request, name: Callable[[], str | None] | None = None
    ) -> web.WebSocketResponse:
        """Serve one member until its connection ends. A second connection of a member replaces the first.

        `name` returns the name of a member whose identity is proven, which replaces the name in its reports.
        The connection ends when that name changes, or when it is None.
        """
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=codec.MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        line: MemberConnection | None = None
        sender: asyncio.Task[None] | None = None
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                report = self._read(message.data)
                if report is not None and name is not None:
                    known = name()
                    report = replace(report, member=known) if known is not None else None
                if report is None:
                    break
                if line is None:
                    line = self.connection(report.member)
                    line.owner, line.sent = socket, None
                    line.changed.set()
                    sender = asyncio.create_task(self._send(socket, line))
                if line.owner is not socket or report.member != line.member:
                    break
                self._accept(line, report)
                self._changed()
        finally:
            if sender is not None:
                sender.cancel()
            if line is not None and line.owner is socket:
                line.connected = False
                self._changed()
        return socket

    def _accept(self, line: MemberConnection, report: MemberReport) -> None:
        now_ns = self._now_ns()
        line.offset = line.offset.heard(report, self._clock, now_ns)
        line.report, line.connected, line.heard_ns = (
            member_clocks.on_supervisor_clock(report, line.offset),
            True,
            now_ns,
        )
        line.first_ns = line.first_ns or now_ns
        self.has_heard = True
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
        """Log a refusal, once for each cause: a refused member reconnects many times a second."""
        cause = _NUMBER.sub("", why)
        if cause not in self._refused:
            self._refused = {*self._refused, cause} if len(self._refused) < MAX_CAUSES else {cause}
            log.warning("report refused", extra={"error": why})

    async def _send(self, socket: web.WebSocketResponse, line: MemberConnection) -> None:
        while True:
            await line.changed.wait()
            # This socket was replaced, and may be half open: an order sent here would not reach the member.
            if line.owner is not socket:
                return
            line.changed.clear()
            if line.order is not None and line.order is not line.sent:
                line.sent = line.order
                try:
                    await socket.send_str(codec.encode(line.order).decode())
                except ConnectionError:
                    return
