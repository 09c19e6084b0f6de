"""Serve the members' connections: receive each member's reports and send its orders.

Decoding a report blocks the process for up to 0.1 s per megabyte. Even a member that has proven its identity
is not trusted by the other jobs that this process supervises. Therefore, each member has only one connection,
and the size and rate of its reports are limited before any is decoded. The members of all jobs also share
limits on the memory that reports take and on the time spent decoding them (`SharedLimits`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.process import clock as hostclock
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import LauncherState
from holdfast.protocol.member_messages import (
    FEATURES,
    MUST_CONFIRM,
    MUST_REACH,
    NEIGHBOURS,
    PING_S,
    PROTOCOL,
    UPDATES,
    MemberOrder,
    MemberReport,
)
from supervisor.controller.limits import report_memory
from supervisor.controller.limits.incoming import MemberBuffer, MeteredConnection
from supervisor.controller.limits.owner import UNSHARED, ReportOwner
from supervisor.controller.limits.report_memory import MemoryHolder
from supervisor.controller.limits.shared import SharedLimits
from supervisor.controller.reports.report_decoder import ReportDecoder
from supervisor.controller.reports.routine_reports import (
    KnownChecksums,
    is_routine,
    only_has_newer_snapshots,
)
from supervisor.decision import unreachable_members
from supervisor.view import member_clocks
from supervisor.view.member_clocks import ClockOffset

log = logging.getLogger(__name__)

# how long a report of new snapshots waits for the other members of the job, which take theirs at the same
# time
SOON_S = 0.5
HELD_S = 0.05  # the interval between checks of whether orders may be sent
MAX_CAUSES = 64  # causes of refusals to remember, to log each only once
MAX_FEATURES = 200  # characters of the header `FEATURES` that are read
_NUMBER = re.compile(r"\d+")
_READ = (WSMsgType.TEXT, WSMsgType.PING, WSMsgType.PONG)

# A report takes 6 KB for 8 ranks and 40 KB for 64 ranks. After a fault, it also contains stacks, the last
# output and private states, and grows to about 1.2 MB plus 2.3 KB per rank.
REPORT_BYTES = 2 << 20
RANK_BYTES = 4 << 10
RATE_BYTES = 2_000_000  # how many bytes a member may send per second, on average
BURST_BYTES = 4_000_000
# for each rank, if an update corrects the clock offset and thus all times of the launcher
CONVERTED_BYTES = 512
LEAST_BYTES = 4096  # a smaller message, such as a ping, is charged this much, because it takes time too


def largest_report(nproc: int) -> int:
    """Return a limit in bytes for the reports of a member with `nproc` ranks."""
    return min(codec.MAX_MESSAGE_BYTES, REPORT_BYTES + nproc * RANK_BYTES)


@dataclass(slots=True)
class ByteBudget:
    """The bytes that a member may send: `BURST_BYTES` in a burst, `RATE_BYTES` per second on average."""

    left_bytes: float = BURST_BYTES
    at_s: float = 0.0  # when `left_bytes` was computed

    def spend(self, sent_bytes: int, now_s: float) -> float:
        """Count a message. Return how many seconds to wait before it is decoded."""
        earned_bytes = max(0.0, now_s - self.at_s) * RATE_BYTES
        left_bytes = min(BURST_BYTES, self.left_bytes + earned_bytes) - max(LEAST_BYTES, sent_bytes)
        self.left_bytes, self.at_s = max(-BURST_BYTES, left_bytes), now_s
        return max(0.0, -self.left_bytes / RATE_BYTES)

    def charge(self, more_bytes: int) -> None:
        """Count what a message has cost in addition to its size."""
        self.left_bytes = max(-BURST_BYTES, self.left_bytes - more_bytes)


@dataclass(slots=True)
class MemberConnection:
    """The connection of one member. While it is broken, it keeps its last values."""

    member: str
    memory: MemoryHolder  # how much is reserved for this member
    report: MemberReport | None = None  # the newest report
    connected: bool = False
    since_ns: int = 0  # on a cluster: when this supervisor began to expect the member's reports
    heard_ns: int = 0  # when the last report arrived
    first_ns: int = 0  # when the first report arrived; 0 if none has arrived
    well_ns: int = 0  # when the member last reported a launcher that responds
    back_ns: int = 0  # see `MemberView`
    stepped_ns: int = 0  # see `MemberView`
    unreached_ns: tuple[tuple[str, int], ...] = ()  # see `MemberView`
    # when the member's host stopped answering probes; 0 if it answers, or if this is unknown
    unanswered_ns: int = 0
    order: MemberOrder | None = None  # the newest order
    sent: MemberOrder | None = None  # the last order that was sent on the current socket
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    offset: ClockOffset = field(default_factory=ClockOffset)  # the offset between the member's clock and ours
    # the launcher's state in the last report, and the clock offset at that time
    received: tuple[LauncherState | None, int] | None = None
    launcher: LauncherState | None = None  # the launcher's state in `received`, with times on this clock
    owner: object = None  # the newest socket of the member; older ones are ignored
    is_new: bool = False  # no report has arrived on `owner` yet
    # what the sidecar supports, as stated when it connects (`FEATURES`)
    features: frozenset[str] = frozenset()
    transport: asyncio.Transport | None = None  # the transport of `owner` while it is open
    budget: ByteBudget = field(default_factory=ByteBudget)


class MemberServer:
    """The connections of all members of one run."""

    heartbeat_s = PING_S  # a connection ends if the response to a ping takes more than half of this time

    def __init__(
        self,
        now_ns: Callable[[], int],
        changed: Callable[[], None],
        clock: str | None = None,
        limits: SharedLimits | None = None,
        reports_of: ReportOwner = UNSHARED,
        is_calm: Callable[[], bool] = lambda: False,
        *,
        has_frequent_rounds: bool = False,
    ) -> None:
        """`changed` is called after each report that contains news, and after each disconnection.

        While `is_calm` returns True, `changed` is not called for routine reports. It is then called `SOON_S`
        late for reports of new snapshots whose checksums match, or not at all if the job has a round at least
        every `SOON_S` (`has_frequent_rounds`).

        `clock` identifies the clock of `now_ns`. The default is the clock of this host. Servers on one event
        loop share `limits`, and `reports_of` says whose reports this server receives.
        """
        self._now_ns = now_ns
        self._clock = hostclock.identity() if clock is None else clock
        self._changed = changed
        self.connections: dict[str, MemberConnection] = {}
        self.has_heard = False  # whether any member has reported
        self._limits, self._reports_of = limits or SharedLimits(), reports_of
        self._is_closed, self._is_calm = False, is_calm
        self._has_frequent_rounds = has_frequent_rounds
        self._checksums = KnownChecksums()
        self._soon: asyncio.TimerHandle | None = None  # calls `changed` for reports of new snapshots
        self._refused: set[str] = set()  # the causes of refusals that were logged

    def connection(self, member: str) -> MemberConnection:
        """Return the member's connection, and begin to expect the member if it has none."""
        if member not in self.connections:
            self.connections[member] = self.peek(member)
        return self.connections[member]

    def peek(self, member: str) -> MemberConnection:
        """Return the member's connection; if it has none, what `connection` would create now."""
        if member in self.connections:
            return self.connections[member]
        memory = MemoryHolder(self._reports_of.namespace, partial(self._give_up, member))
        return MemberConnection(member, memory, heard_ns=self._now_ns())

    def discount_own_pause(self, late_ns: int) -> None:
        """Do not count the last `late_ns`, during which this process did not run, as the members' silence."""
        now_ns = self._now_ns()

        def moved(at_ns: int) -> int:
            # On a cluster, the silence of a member that has yet to connect begins in the future.
            return at_ns + late_ns if at_ns > now_ns else min(now_ns, at_ns + late_ns)

        for line in self.connections.values():
            line.heard_ns = moved(line.heard_ns)
            line.since_ns = line.since_ns and moved(line.since_ns)
            line.first_ns = line.first_ns and moved(line.first_ns)
            line.stepped_ns = line.stepped_ns and moved(line.stepped_ns)
            line.unreached_ns = tuple((url, moved(at_ns)) for url, at_ns in line.unreached_ns)
            line.unanswered_ns = 0

    def order(self, member: str, order: MemberOrder) -> None:
        """Send `order` to a member now, or when it connects. An order that it already has is not repeated."""
        line = self.connection(member)
        if line.order != order:
            line.order = order
            line.changed.set()

    def keep(self, members: Container[str]) -> None:
        """Forget all members that are neither in `members` nor connected."""
        for name, line in tuple(self.connections.items()):
            if name not in members and not line.connected:
                self._limits.memory.release(line.memory)
                del self.connections[name]

    def close(self) -> None:
        """Accept no more reports, and release the memory of this server's members."""
        self._is_closed = True
        if self._soon is not None:
            self._soon.cancel()
        for line in self.connections.values():
            self._limits.memory.release(line.memory)
            # This server and its lines refer to each other, so they may wait long for the garbage collector.
            line.report = line.launcher = line.received = None

    async def serve(
        self,
        request: web.Request,
        name: Callable[[], str | None] | None = None,
        max_bytes: int = codec.MAX_MESSAGE_BYTES,
        why_refused: Callable[[MemberReport], str] = lambda _: "",
    ) -> web.WebSocketResponse:
        """Serve one member until its connection ends. A second connection of a member replaces the first.

        If the member's identity is proven, `name` returns its name, which replaces the name in its reports.
        The connection ends if that name changes or becomes None, if a report has more than `max_bytes`, if
        `why_refused` returns a reason, or if there is no memory for it. Reports that exceed the member's
        `ByteBudget` are read later.
        """
        # If aiohttp decoded the text, text that is not ASCII could take four times as much memory while it
        # waits.
        socket = web.WebSocketResponse(
            protocols=(UPDATES,),
            heartbeat=None if isinstance(request.protocol, MeteredConnection) else self.heartbeat_s,
            max_msg_size=max_bytes,
            compress=False,
            autoping=False,
            decode_text=False,
        )
        await socket.prepare(request)
        line: MemberConnection | None = None
        sender: asyncio.Task[None] | None = None
        decoder = ReportDecoder()
        known = name() if name is not None else None
        if known is not None:
            line = self._take_over(known, socket, request)
        buffer = self._metered(request, socket, max_bytes)
        try:
            async for message in socket:
                if message.type not in _READ:
                    if getattr(message.data, "code", 0) == WSCloseCode.MESSAGE_TOO_BIG:
                        self._refuse(f"a report of more than {max_bytes} bytes")
                    break
                size = len(message.data)
                if buffer is not None:
                    buffer.has_whole_message = True
                if name is not None and not await self._admit(line, name, size):
                    break
                expected_s = await self._limits.turns.wait(self._reports_of, size)
                if line is not None and (line.owner is not socket or (name and name() != line.member)):
                    break
                if message.type is WSMsgType.PING:
                    await socket.pong(message.data)
                report, is_text = None, message.type is WSMsgType.TEXT
                began_s = time.perf_counter()
                if is_text:
                    report = self._read_for(line, decoder, message.data, why_refused)
                del message  # free it before the next message arrives
                if buffer is not None:
                    buffer.passed_on(size)
                if report is None:
                    if is_text:
                        break
                    continue
                if name is None and line is None:
                    line = self._take_over(report.member, socket, request)
                assert line is not None  # if `name` is given, this was checked above
                if name is None and report.member != line.member:
                    break
                if sender is None:
                    line.changed.set()
                    sender = asyncio.create_task(self._send(socket, line))
                self._receive(line, report, decoder.was_update)
                self._limits.turns.spend(self._reports_of, time.perf_counter() - began_s, expected_s)
        finally:
            if sender is not None:
                sender.cancel()
            if buffer is not None:
                buffer.close()
            if line is not None and line.owner is socket:
                line.connected, line.transport = False, None
                self._changed()
        await _close(socket)
        return socket

    def _metered(
        self, request: web.Request, socket: web.WebSocketResponse, max_bytes: int
    ) -> MemberBuffer | None:
        """Begin to count what the connection of `request` receives, if it is a `MeteredConnection`.

        Such a connection also pings a silent member, and ends if the member does not respond.
        """
        connection = request.protocol
        if not isinstance(connection, MeteredConnection):
            return None
        buffer = MemberBuffer(self._limits.incoming, self._reports_of.namespace, max_bytes, connection)
        connection.buffer = buffer
        connection.end_when_silent(self.heartbeat_s, lambda: asyncio.create_task(_ping(socket)))
        return buffer

    async def _admit(self, line: MemberConnection | None, name: Callable[[], str | None], size: int) -> bool:
        """Wait until the member's budget allows a message of `size` bytes.

        Return whether `name` still returns the name under which the connection began.
        """
        if line is None:
            return False
        wait_s = line.budget.spend(size, time.monotonic())
        if wait_s > 0:  # the socket is not read during this wait
            await asyncio.sleep(wait_s)
        return name() == line.member

    def _take_over(
        self, member: str, socket: web.WebSocketResponse, request: web.Request
    ) -> MemberConnection:
        """Make `socket` the connection of `member`. Close the previous one and drop what it has received."""
        line = self.connection(member)
        if line.transport is not None:
            line.transport.abort()
        line.owner, line.transport, line.sent, line.is_new = socket, request.transport, None, True
        line.features = frozenset(request.headers.get(FEATURES, "")[:MAX_FEATURES].split())
        return line

    def _give_up(self, member: str) -> None:
        """End a member's connection and forget its report, whose memory other namespaces need."""
        line = self.connections[member]
        if line.transport is not None:
            line.transport.abort()
        line.report = line.launcher = line.received = line.owner = line.transport = None
        line.connected = False
        self._refuse("other namespaces need the memory that the reports of this one take")
        self._changed()

    def note_report(self, before: MemberReport | None, report: MemberReport, is_update: bool) -> None:
        """Call `changed` if `report`, which was just accepted, contains news.

        `before` is the previous report, if any. With `is_update`, `report` differs from it only in passing
        values.
        """
        differs = not is_update and before is not None and self._checksums.differ(before, report)
        if self._is_calm():
            if is_routine(before, report, is_update):
                return
            if not differs and only_has_newer_snapshots(before, report):
                if self._soon is None and not self._has_frequent_rounds:
                    self._soon = asyncio.get_running_loop().call_later(SOON_S, self._snapshots_reported)
                return
        self._changed()

    def _snapshots_reported(self) -> None:
        self._soon = None
        self._changed()

    def _receive(self, line: MemberConnection, report: MemberReport, is_update: bool) -> None:
        before, launcher = line.report if line.connected else None, line.launcher
        accepted = self._accept(line, report)
        if is_update and line.launcher is not launcher:  # its times have been corrected
            is_update = False
            line.budget.charge(CONVERTED_BYTES * len(line.launcher.ranks if line.launcher else ()))
        self.note_report(before, accepted, is_update)

    def _accept(self, line: MemberConnection, report: MemberReport) -> MemberReport:
        """Store and return `report`, under the name of its member and with times on this clock."""
        now_ns = self._now_ns()
        line.offset = line.offset.heard(report, self._clock, now_ns)
        if line.received != (report.launcher, line.offset.ns):  # usually only the ranks' progress has changed
            line.received = (report.launcher, line.offset.ns)
            line.launcher = member_clocks.on_supervisor_clock(report, line.offset).launcher
        if report.member != line.member or report.launcher is not line.launcher:
            # Nothing else refers to the report yet. A copy would add a tenth to the time that a report takes.
            object.__setattr__(report, "member", line.member)
            object.__setattr__(report, "launcher", line.launcher)
        if line.is_new:
            line.is_new, line.back_ns = False, now_ns if line.first_ns else 0
        line.unreached_ns = unreachable_members.named_since(
            line.unreached_ns, report.unreached, line.heard_ns, now_ns
        )
        line.report, line.connected, line.heard_ns = report, True, now_ns
        line.first_ns = line.first_ns or now_ns
        self.has_heard = True
        if report.launcher is not None and not report.launcher_silent:
            line.well_ns = now_ns
        return report

    def _read_for(
        self,
        line: MemberConnection | None,
        decoder: ReportDecoder,
        data: bytes,
        why_refused: Callable[[MemberReport], str],
    ) -> MemberReport | None:
        """Decode a report, and reserve memory for it.

        `line` is None for the first report of a member whose identity is not proven.
        """
        if self._is_closed:
            return None
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError:  # `codec.encode` writes only ASCII
            self._refuse("a report with characters outside of ASCII")
            return None
        report = self._read(decoder, text)
        if report is None or line is None:
            return report
        size = report_memory.member_bytes(decoder.retained_bytes)
        why = why_refused(report) or self._limits.memory.reserve(line.memory, size)
        if why:
            self._refuse(why)
        return None if why else report

    def _read(self, decoder: ReportDecoder, data: str) -> MemberReport | None:
        try:
            report = decoder.decode(data)
        except codec.InvalidMessage as error:
            self._refuse(str(error))
            return None
        if report.protocol != PROTOCOL:
            self._refuse(f"protocol {report.protocol}")
            return None
        return report

    def _refuse(self, why: str) -> None:
        """Log a refusal once for each cause, because a refused member reconnects many times a second."""
        cause = _NUMBER.sub("", why)
        if cause not in self._refused:
            self._refused = {*self._refused, cause} if len(self._refused) < MAX_CAUSES else {cause}
            log.warning("report refused", extra={"error": why})
            self.tell_refusal(why)

    def tell_refusal(self, why: str) -> None:
        """Tell the user that reports are refused, once for each cause. The refusal is already in the log."""

    def may_send(self) -> bool:
        """True if orders may be sent now. If not, they are sent as soon as this returns True."""
        return True

    async def _send(self, socket: web.WebSocketResponse, line: MemberConnection) -> None:
        while True:
            await line.changed.wait()
            # This socket was replaced and may be half open, so an order sent here could be lost.
            if line.owner is not socket:
                return
            if not self.may_send():
                await asyncio.sleep(HELD_S)
                continue
            line.changed.clear()
            if line.order is not None and line.order is not line.sent:
                line.sent = line.order
                text = codec.encode(_readable(line.order, line.features)).decode()
                if len(text) > codec.MAX_MESSAGE_BYTES:  # the member would end the connection
                    size = {"member": line.member, "bytes": len(text)}
                    log.error("order too large", extra={**size, "limit": codec.MAX_MESSAGE_BYTES})
                    continue
                try:
                    await socket.send_str(text)
                except ConnectionError:
                    return


async def _close(socket: web.WebSocketResponse) -> None:
    """Close a connection, and free what it has received even if the other end is gone.

    The error that a socket keeps refers to the socket. Both, and megabytes of unread messages, would wait for
    the garbage collector.
    """
    await socket.close()
    error = socket.exception()
    if error is not None:
        error.__traceback__ = None


async def _ping(socket: web.WebSocketResponse) -> None:
    with suppress(ConnectionError):  # the connection is ending
        await socket.ping()


def _readable(order: MemberOrder, features: frozenset[str]) -> MemberOrder:
    """Return `order` without what a sidecar with these features would refuse."""
    if order.must_confirm and MUST_CONFIRM not in features:
        order = replace(order, must_confirm=())
    if order.must_reach and MUST_REACH not in features:
        order = replace(order, must_reach=())
    return order if NEIGHBOURS in features or not order.neighbours else replace(order, neighbours=())
