"""The members' connections to the supervisor in simulated time: they break, delay or duplicate messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from holdfast.protocol.member_messages import MemberOrder, MemberReport
from supervisor.cluster.pod_server import COME_S
from supervisor.decision import unreachable_members
from supervisor.view.model import JobState, MemberView
from tests.simulation.cluster.member import MS, Member

if TYPE_CHECKING:
    from tests.simulation.cluster.world import World

LATENCY_MS, BEAT_MS, RETRY_MS = 1, 500, 50
COME_NS = int(COME_S * 1e9)  # on a cluster, the silence of a member counts only from then on


@dataclass
class Line:
    """The supervisor's view of a member's connection. Messages of an older connection never arrive."""

    report: MemberReport | None = None
    connected: bool = False
    since_ns: int = 0  # since when the supervisor has expected reports
    heard_ns: int = 0
    first_ns: int = 0
    well_ns: int = 0
    back_ns: int = 0
    is_new: bool = False  # no report has arrived on the newest connection yet
    sent: MemberOrder | None = None
    epoch: int = 0
    stepped_ns: int = 0
    unreached_ns: tuple[tuple[str, int], ...] = ()


@dataclass
class Network:
    """The connections of all members."""

    world: World
    lines: dict[str, Line] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    slow_ms: dict[str, int] = field(default_factory=dict)
    twice: bool = False  # every message arrives twice
    late_ms: dict[str, int] = field(default_factory=dict)  # how much later a member finds a new supervisor
    muted: set[str] = field(default_factory=set)  # members whose reports are lost; the connections stay open
    unanswered: dict[str, int] = field(default_factory=dict)  # when each host stopped answering probes
    _last_ns: dict[tuple[str, bool], int] = field(default_factory=dict)

    def line(self, name: str) -> Line:
        found = self.lines.get(name)
        if found is None:
            found = self.lines[name] = Line(since_ns=self.world.now_ns, heard_ns=self.world.now_ns)
        return found

    def view(self, name: str, memory: JobState) -> MemberView:
        line = self.line(name)
        exists = name in self.world.exists and name not in memory.lost
        silent_s = round((self.world.now_ns - line.heard_ns) / 1e9, 3)
        since_ns = self.unanswered.get(name, self.world.now_ns)
        is_awaited = self.world.policy.members_created_externally and not line.first_ns
        awaited_s = round((self.world.now_ns - line.since_ns) / 1e9, 3) if is_awaited else 0.0
        return MemberView(
            *(name, exists, line.connected, silent_s, line.report, line.first_ns, line.well_ns),
            stepped_ns=line.stepped_ns,
            unanswered_s=round((self.world.now_ns - since_ns) / 1e9, 3),
            awaited_s=awaited_s,
            back_ns=line.back_ns,
            unreached_ns=line.unreached_ns,
        )

    def _deliver(self, name: str, epoch: int, outward: bool, act: partial[None]) -> None:
        """Call `act` at the other end, in order, unless the connection has broken by then."""
        at_ns = self.world.now_ns + (LATENCY_MS + self.slow_ms.get(name, 0)) * MS
        at_ns = max(at_ns, self._last_ns.get((name, outward), 0))
        self._last_ns[name, outward] = at_ns

        def arrive() -> None:
            if self.line(name).epoch == epoch and name not in self.cut:
                act()

        for _ in range(1 + self.twice):
            self.world.at_ns(at_ns, arrive)

    # -- from the member

    def connect(self, member: Member) -> None:
        """Report everything over a new connection. Retry while there is no supervisor."""
        if member.gone or member.sidecar is None:
            return
        if not self.world.is_supervised or member.name in self.cut:
            self.world.after(RETRY_MS, partial(self._reconnect, member, member.sidecar))
            return
        line = self.line(member.name)
        line.epoch, line.sent, line.is_new = line.epoch + 1, None, True
        self.tell(member)
        self._beat(member, line.epoch)

    def _reconnect(self, member: Member, sidecar: object) -> None:
        if member.sidecar is sidecar:
            self.connect(member)

    def _beat(self, member: Member, epoch: int) -> None:
        if self.line(member.name).epoch == epoch and not member.gone:
            self.world.after(BEAT_MS, partial(self._beat_again, member, epoch))

    def _beat_again(self, member: Member, epoch: int) -> None:
        if self.line(member.name).epoch == epoch:
            self.tell(member)
            self._beat(member, epoch)

    def tell(self, member: Member) -> None:
        if member.sidecar is not None and not member.gone:
            hear = partial(self._hear, member.name, member.sidecar.report())
            self._deliver(member.name, self.line(member.name).epoch, False, hear)

    def _hear(self, name: str, report: MemberReport) -> None:
        if self.world.is_supervised and name not in self.muted:
            line = self.line(name)
            before = line.report
            is_cluster = self.world.policy.members_created_externally
            if is_cluster and before is not None and _steps(report) > _steps(before):
                line.stepped_ns = self.world.now_ns
            if line.is_new:
                line.is_new, line.back_ns = False, self.world.now_ns if line.first_ns else 0
            line.unreached_ns = unreachable_members.named_since(
                line.unreached_ns, report.unreached, line.heard_ns, self.world.now_ns
            )
            line.report, line.connected, line.heard_ns = report, True, self.world.now_ns
            line.first_ns = line.first_ns or self.world.now_ns
            if report.launcher is not None:
                line.well_ns = self.world.now_ns
            self.world.heard()

    # -- from the supervisor

    def order(self, name: str, order: MemberOrder) -> bool:
        """Send `order` unless it equals the last one sent. Return True if it was sent."""
        line = self.line(name)
        if not line.connected or line.sent == order:
            return False
        line.sent = order
        self._deliver(name, line.epoch, True, partial(self._obey, self.world.members[name], order))
        return True

    @staticmethod
    def _obey(member: Member, order: MemberOrder) -> None:
        if member.sidecar is not None:
            member.sidecar.obey(order)

    # -- faults

    def hang_up(self, name: str) -> None:
        line = self.line(name)
        line.epoch += 1
        if line.connected:
            line.connected = False
            self.world.after(LATENCY_MS, self.world.look)

    def cut_off(self, name: str, for_ms: int) -> None:
        """Lose every message of a member for a while; then let it reconnect."""
        self.cut.add(name)
        self.hang_up(name)
        self.world.after(for_ms, partial(self._mend, name))

    def _mend(self, name: str) -> None:
        self.cut.discard(name)
        self.connect(self.world.members[name])

    def cut_from_supervisor(self, name: str, for_ms: int, answers: bool = False) -> None:
        """Lose the reports of a member for a while. Unless `answers`, its host answers no probes."""
        self.muted.add(name)
        if not answers:
            self.unanswered[name] = self.world.now_ns
        self.world.after(for_ms, partial(self._hear_again, name))

    def _hear_again(self, name: str) -> None:
        self.muted.discard(name)
        self.unanswered.pop(name, None)

    def delay(self, name: str, by_ms: int, for_ms: int) -> None:
        """Delay a member's messages, in both directions, for a while."""
        self.slow_ms[name] = by_ms
        self.world.after(for_ms, partial(self.slow_ms.pop, name, 0))

    def forget(self) -> None:
        """Drop all connections of a dead supervisor; the members reconnect one by one."""
        now_ns, is_cluster = self.world.now_ns, self.world.policy.members_created_externally
        heard_ns = now_ns + (COME_NS if is_cluster and self.world.is_supervised else 0)
        self.lines = {
            name: Line(since_ns=now_ns, heard_ns=heard_ns, epoch=self.line(name).epoch + 1)
            for name in self.world.members
        }
        for number, name in enumerate(sorted(self.world.exists)):
            late_ms = self.late_ms.get(name, 0) if self.world.is_supervised else 0
            self.world.after(5 + 7 * number + late_ms, partial(self.connect, self.world.members[name]))


def _steps(report: MemberReport) -> int:
    """Return how many steps the member's ranks have completed in all."""
    return sum(each.step for each in report.progress)
