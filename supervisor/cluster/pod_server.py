"""Serve the connections of one job's members, and give them the job's secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from aiohttp import web

from holdfast.process import network
from holdfast.protocol.member_messages import CLUSTER_PING_S, MemberOrder, MemberReport
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.controller.limits.owner import UNSHARED, ReportOwner
from supervisor.controller.limits.shared import SharedLimits
from supervisor.controller.member_server import MemberConnection, MemberServer

UNREACHABLE_S = 10.0  # a member's connection ends after its host has not answered for this long
COME_S = 30.0  # how long members have to connect to a new supervisor


class PodServer(MemberServer):
    """The connections of one job's members; each order carries the job's secret.

    Members need time to find a new supervisor, so their silence counts only after `COME_S`.
    """

    heartbeat_s = CLUSTER_PING_S

    def __init__(
        self,
        changed: Callable[[], None],
        secret: str,
        is_calm: Callable[[], bool] = lambda: False,
        limits: SharedLimits | None = None,
        reports_of: ReportOwner = UNSHARED,
        refused: Callable[[str], None] = lambda why: None,
        may_order: Callable[[], bool] = lambda: True,
    ) -> None:
        """`changed` and `is_calm` are those of `MemberServer`.

        `refused` is called with each new reason for refusing a report. While `may_order` returns False,
        orders wait.
        """
        super().__init__(time.monotonic_ns, changed, limits=limits, reports_of=reports_of, is_calm=is_calm)
        self._may_order = may_order
        self._secret, self._report_refused = secret, refused
        self._given: dict[str, MemberOrder] = {}  # the order of each connected member, without the secret
        self._began_ns = time.monotonic_ns()

    def peek(self, member: str) -> MemberConnection:
        line = super().peek(member)
        if member not in self.connections:
            line.since_ns = self._began_ns
            line.heard_ns = max(line.heard_ns, self._began_ns + int(COME_S * 1e9))
        return line

    def _take_over(
        self, member: str, socket: web.WebSocketResponse, request: web.Request
    ) -> MemberConnection:
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is not None:
            network.end_if_unreachable(connection, UNREACHABLE_S)
        return super()._take_over(member, socket, request)

    def _accept(self, line: MemberConnection, report: MemberReport) -> MemberReport:
        before = line.report
        accepted = super()._accept(line, report)
        if before is not None and _has_stepped(before, accepted):
            line.stepped_ns = line.heard_ns
        line.unanswered_ns = 0
        return accepted

    def order(self, member: str, order: MemberOrder) -> None:
        if self._given.get(member) != order:
            self._given[member] = order
            super().order(member, replace(order, secret=self._secret))

    def may_send(self) -> bool:
        return self._may_order()

    def keep(self, members: Container[str]) -> None:
        super().keep(members)
        self._given = {name: order for name, order in self._given.items() if name in self.connections}

    def tell_refusal(self, why: str) -> None:
        self._report_refused(why)

    def responds(self, member: str) -> bool:
        """True if the member is connected and its launcher responds."""
        line = self.connection(member)
        report = line.report
        return (
            line.connected
            and report is not None
            and report.launcher is not None
            and not report.launcher_silent
        )

    def reports(self) -> Iterable[MemberReport]:
        """Return the newest report of each connected member."""
        return [
            each.report for each in self.connections.values() if each.connected and each.report is not None
        ]


def _has_stepped(before: MemberReport, report: MemberReport) -> bool:
    """Return True if a rank of `report` has completed steps since the previous report."""
    pairs = zip(before.progress, report.progress, strict=False)
    return any(other.step > one.step and other.rank == one.rank for one, other in pairs)


def job_secret(secret: bytes, key: JobKey) -> str:
    """Return the secret of a job: the same for each leader, and different for every job."""
    name = json.dumps([key.namespace, key.name, key.uid]).encode()
    return hmac.new(secret, b"holdfast job " + name, hashlib.sha256).hexdigest()
