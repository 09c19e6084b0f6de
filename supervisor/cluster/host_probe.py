"""Probe the hosts of silent members, because a host without power does not answer.

A probe opens a TCP connection to the member's pod, on a port where usually nothing listens. If the host's
kernel refuses or accepts the connection, the host is running, even if the sidecar is stopped. Only the
absence of any answer is evidence against a host, and only if this supervisor has received an answer from it
before, because a NetworkPolicy may drop the probes. For a member that has not connected to a new leader yet,
an answer from another node's pod of the same job is enough. If most nodes do not answer, the network of this
supervisor is more likely to be at fault, so the probes are not used as evidence.

If the previous leader was replaced because its host did not answer, the series of unanswered probes of a
member on its node begins with the probes of that leader, but only once a probe of the member has failed.

`supervisor.view.members` decides what the evidence means.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, NoReturn

from holdfast.process import event_loop
from holdfast.process.network import NO_ANSWER, UNUSED_PORT
from supervisor.controller.member_server import MemberConnection

PORT = UNUSED_PORT
PROBE_S = 1.0  # without an answer for this long, a probe has failed; the kernel repeats its packet after 1 s
SILENT_NS = 1_000_000_000  # a member reports every half second; a silent one is probed repeatedly
USUAL_S = 60.0  # the time between two probes of a member that reports
TICK_S = 0.25
# replaces both in the first `FIRST_S` of a leader, which finds its members one after another
FIRST_TICK_S = 0.05
FIRST_S = 10.0
SUSPECTED_S = 30.0  # how long probes of the previous leader's host are used
QUIET_TICK_S = 0.5  # replaces `TICK_S` while no member is silent
LATE_S = 0.5  # if this process wakes up this late, it was stopped, and earlier probes prove nothing
MOST_SILENT = 512  # concurrent probes of silent members, each of which takes up to `PROBE_S`
MOST_USUAL = 32  # the same for members that report, whose hosts usually answer within a millisecond
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class HostAnswer(Enum):
    ANSWERED = "answered"
    NONE = "none"
    UNKNOWN = "unknown"  # this supervisor could not probe, or was stopped during the probe


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What this supervisor knows from its probes of one pod's address."""

    address: str
    due_ns: int = 0  # when the next probe is due while the member reports
    asked_ns: int = 0  # when the last probe began
    has_answered: bool = False
    unanswered_ns: int = 0  # when the current series of unanswered probes began; 0 for none
    # since when the host has not answered probes of another address; 0 if it may answer
    suspected_ns: int = 0

    def after(self, answer: HostAnswer, began_ns: int, wait_s: float) -> HostRecord:
        """Return the record after a probe begun at `began_ns`; the next regular one is due after `wait_s`."""
        has_answered = self.has_answered or answer is HostAnswer.ANSWERED
        unanswered_ns = 0
        if answer is HostAnswer.NONE:
            unanswered_ns = self.unanswered_ns or self.suspected_ns or began_ns
        return HostRecord(self.address, began_ns + int(wait_s * 1e9), began_ns, has_answered, unanswered_ns)


class ProbedMember(NamedTuple):
    """A member of a running group. `changed` must be called if its host stops answering.

    `group` is the same object for the members of one job.
    """

    uid: str  # of its pod
    address: str
    node: str
    group: object
    line: MemberConnection
    changed: Callable[[], None]


def lost_nodes(found: Iterable[tuple[str, bool]]) -> frozenset[str]:
    """Return the nodes that do not answer, given each member's node and whether its probe lacks an answer.

    All of these members have answered before. The result is empty if most of their nodes do not answer. A
    node is not lost if any of its members answers.
    """
    answers: dict[str, bool] = {}
    for node, is_unanswered in found:
        answers[node] = answers.get(node, False) or not is_unanswered
    lost = frozenset(node for node, answered in answers.items() if not answered)
    return lost if 2 * len(lost) <= len(answers) else frozenset()


async def probe(address: str) -> HostAnswer:
    """Return whether the host of a pod's address answers. Never raises."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            code = await _connect(connection, address)
    except (OSError, ValueError):  # for example, no descriptor is left
        return HostAnswer.UNKNOWN
    if code is None:
        return HostAnswer.NONE if loop.time() - began_s < PROBE_S + LATE_S else HostAnswer.UNKNOWN
    return meaning(code)


def meaning(code: int) -> HostAnswer:
    """Return what the error of an attempt to connect says about the host; 0 is success."""
    if code in _ANSWERS:
        return HostAnswer.ANSWERED
    return HostAnswer.NONE if code in NO_ANSWER else HostAnswer.UNKNOWN


async def _connect(connection: socket.socket, address: str) -> int | None:
    """Return the error of an attempt to connect, 0 for success; None if no answer arrives within `PROBE_S`.

    If the event loop was late, an answer that has arrived still counts, because the loop checks its
    connections before its timers.
    """
    loop = asyncio.get_running_loop()
    code = connection.connect_ex((address, PORT))
    if code == errno.ENETUNREACH:
        raise OSError(code, "the host of this supervisor has no route")  # a router's answer comes later
    if code != errno.EINPROGRESS:
        return code
    answered: asyncio.Future[bool] = loop.create_future()

    def settle(answer: bool) -> None:
        if not answered.done():
            answered.set_result(answer)

    loop.add_writer(connection, settle, True)
    timer = loop.call_later(PROBE_S, settle, False)
    try:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if await answered else None
    finally:
        timer.cancel()
        loop.remove_writer(connection)


class HostProbes:
    """Probes the hosts of a leader's members, and keeps `MemberConnection.unanswered_ns` up to date."""

    def __init__(
        self,
        members: Callable[[], Iterable[ProbedMember]],
        ask: Callable[[str], Awaitable[HostAnswer]] = probe,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._members, self._ask, self._now_ns = members, ask, now_ns
        self._records: dict[str, HostRecord] = {}  # by the uid of the pod
        self._silent: dict[str, asyncio.Task[None]] = {}  # probes of silent members in progress, by uid
        self._usual: dict[str, asyncio.Task[None]] = {}  # the same for members that report
        self._suspected = ("", 0, 0)  # a node, since when it has not answered, and until when this is used

    def suspect(self, node: str, silent_s: float) -> None:
        """Record that the previous leader's host on `node` has not answered for `silent_s`."""
        now_ns = self._now_ns()
        self._suspected = (node, now_ns - int(silent_s * 1e9), now_ns + int(SUSPECTED_S * 1e9))

    async def run(self) -> NoReturn:
        """Probe until cancelled."""
        first_ns = self._now_ns() + int(FIRST_S * 1e9)
        try:
            while True:
                wait_s = self.probe_due()
                if self._now_ns() < first_ns:
                    wait_s = FIRST_TICK_S
                due_ns = self._now_ns() + int(wait_s * 1e9)
                await asyncio.sleep(wait_s)
                if self._now_ns() - due_ns > LATE_S * 1e9:
                    self.forget_failures()
        finally:
            await event_loop.end([*self._silent.values(), *self._usual.values()])

    def forget_failures(self) -> None:
        """Call this if this process was stopped, because answers may have arrived too late to be noticed."""
        self._suspected = ("", 0, 0)
        for uid, record in self._records.items():
            if record.unanswered_ns or record.suspected_ns:
                self._records[uid] = replace(record, unanswered_ns=0, suspected_ns=0)

    def probe_due(self) -> float:
        """Begin the probes that are due, and store the results of earlier ones in the members' connections.

        Return the seconds until the next call.
        """
        now_ns = self._now_ns()
        heard_ns, asked_ns = now_ns - SILENT_NS, now_ns - int(PROBE_S * 1e9)
        node, since_ns, until_ns = self._suspected
        records: dict[str, HostRecord] = {}
        silent: list[ProbedMember] = []
        for member in self._members():  # there may be thousands, most of which report
            uid, line = member.uid, member.line
            record = self._records.get(uid)
            if record is None or record.address != member.address:
                record = HostRecord(member.address)
            if node == member.node and now_ns < until_ns and not record.asked_ns:
                record = replace(record, suspected_ns=since_ns)
            records[uid] = record
            if line.heard_ns < heard_ns or not line.first_ns:
                silent.append(member)
                is_due = record.asked_ns <= asked_ns
                if is_due and uid not in self._silent and len(self._silent) < MOST_SILENT:
                    self._begin(member, self._silent)
            elif record.due_ns <= now_ns and uid not in self._usual and len(self._usual) < MOST_USUAL:
                self._begin(member, self._usual)
        self._records = records
        self._tell(silent)
        return TICK_S if silent else QUIET_TICK_S

    def _tell(self, silent: Iterable[ProbedMember]) -> None:
        unanswered = {member.uid: self._records[member.uid].unanswered_ns for member in silent}
        lost: frozenset[str] = frozenset()
        if any(unanswered.values()):
            judged = self._judged()
            lost = lost_nodes((member.node, bool(unanswered.get(member.uid))) for member in judged)
            unanswered = {member.uid: unanswered[member.uid] for member in judged if member.uid in unanswered}
        for member in silent:
            since_ns = unanswered.get(member.uid, 0) if member.node in lost else 0
            if since_ns != member.line.unanswered_ns:
                member.line.unanswered_ns = since_ns
                if since_ns:
                    member.changed()

    def _judged(self) -> list[ProbedMember]:
        """Return the members whose probes are known to be answerable: see the module's docstring."""
        members = list(self._members())
        nodes: dict[int, set[str]] = {}  # the nodes of each group that have answered
        for member in members:
            if self._records[member.uid].has_answered:
                nodes.setdefault(id(member.group), set()).add(member.node)
        return [
            member
            for member in members
            if self._records[member.uid].has_answered
            or (not member.line.first_ns and nodes.get(id(member.group), set()) - {member.node})
        ]

    def _begin(self, member: ProbedMember, under_way: dict[str, asyncio.Task[None]]) -> None:
        task = asyncio.create_task(self._probe(member), name=f"probe {member.uid}")
        under_way[member.uid] = task
        task.add_done_callback(lambda _: under_way.pop(member.uid, None))

    async def _probe(self, member: ProbedMember) -> None:
        began_ns = self._now_ns()
        answer = await self._ask(member.address)
        record = self._records.get(member.uid)
        if record is not None and record.address == member.address:
            # spread out, because members that connected together would otherwise always be probed together
            wait_s = USUAL_S * random.uniform(0.75, 1.25)
            self._records[member.uid] = record.after(answer, began_ns, wait_s)
