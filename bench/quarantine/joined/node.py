"""A node of the joined year: a machine, its agent, and what the quarantine reads from the agent's reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.quarantine.joined.agent import NodeAgent
from bench.quarantine.joined.faults import NodeFault
from bench.quarantine.joined.machine import SimulatedMachine
from bench.quarantine.simulated_node import FRESH_S, Node
from nodeagent.policy.loading import shipped
from supervisor.quarantine import reports
from supervisor.quarantine.model import NodePolicy, NodeView, Report
from supervisor.quarantine.reports import Received

NEVER_S = float("inf")


class JoinedNode(Node):
    """A node whose reports come from a real agent, through the quarantine's real reader."""

    def __init__(self, name: str, rack: str, phase_s: float, lemon: bool, policy: NodePolicy) -> None:
        super().__init__(name, rack, phase_s, lemon)
        self.machine = SimulatedMachine(name)
        self.daemon = NodeAgent(self.machine, shipped())
        self.faults: list[NodeFault] = []
        self.false: dict[str, str] = {}  # false alarms: the entity, and why it was reported
        self.is_down = False
        self.boot_seen_s = self.started_s = 0.0
        self.levels: dict[str, int] = {}  # levels of the entities with findings, at the last look
        self.moved: Callable[[JoinedNode], None] = lambda _: None  # called when the findings have changed
        self._policy = policy
        self._marks: object = None
        self._beat_s = NEVER_S
        self._newest: Received | None = None
        self._read: Report | None = None
        self.daemon.start(0.0)

    @property
    def is_ill(self) -> bool:
        return any(level == 2 for level in self.levels.values())

    # -- the agent

    def look(self, now_s: float) -> None:
        """Let the agent take and evaluate readings, and call `moved` if its findings have changed."""
        self.daemon.look(now_s)
        self._compare(now_s)

    def stop(self, now_s: float) -> None:
        """Stop the agent. The quarantine keeps its last report."""
        if self.daemon.runs:
            self._receive(now_s)
            self.daemon.stop(now_s)

    def start(self, now_s: float) -> None:
        if not self.daemon.runs and not self.is_down:
            self.daemon.start(now_s)
            self.started_s = now_s
            self._compare(now_s)
            self._receive(now_s)
            self.changed_s = now_s

    def boot(self, now_s: float) -> None:
        self.machine.boot(now_s)
        self.boot_seen_s = now_s

    def _compare(self, now_s: float) -> None:
        marks = self.daemon.marks()
        if marks is self._marks:
            return
        was_ill = self.is_ill
        self._marks, self.levels = marks, self.daemon.levels()
        self.changed_s, self._beat_s = now_s, NEVER_S
        if was_ill and not self.is_ill:
            self.clean_at_s = self.calmed_at_s = now_s
        self.moved(self)

    # -- views

    def hush(self, now_s: float) -> None:
        if not self.cut_off:
            self._receive(now_s)
        self.cut_off += 1

    def _receive(self, now_s: float) -> None:
        """Receive the agent's report if it has sent a new one, at its interval or because of a change."""
        if not self.daemon.runs or self.cut_off or self._heard_at_s(now_s) == self._beat_s:
            return
        self._newest = Received(self.name, self.daemon.report(now_s), now_s)
        self._read = None
        self._compare(now_s)
        self._beat_s = self._heard_at_s(now_s)

    def view(self, now_s: float) -> NodeView:
        self._receive(now_s)
        received = self._newest
        assert received is not None
        if self._read is None or received.at_s < self.boot_seen_s:
            where = reports.Machine(self.machine.boot_id, "", self.boot_seen_s)
            seen = reports.heard(self.standing, where, (received,), now_s, self._policy)
            if received.at_s >= self.boot_seen_s:
                self._read = seen.report
            return seen
        return replace(self.standing, report=self._read, silent_s=now_s - received.at_s)

    def is_plain(self, now_s: float) -> bool:
        shown = self.standing
        marked = shown.quarantine or shown.waiver or shown.cordoned or not shown.ready
        silent = self.cut_off or not self.daemon.runs
        return not (marked or self.levels or silent or now_s - self.calmed_at_s < FRESH_S)

    def has_news_since(self, at_s: float) -> bool:
        """Return True if a finding has had a new sign since then, or has survived a reboot since then."""
        found = self.daemon.findings()
        signs = [each.since_s if each.code is None else each.last_s for each in found]
        outlives = self.boot_seen_s > at_s and any(each.lasting or each.code is None for each in found)
        return outlives or max(signs, default=-NEVER_S) > self.daemon.agent_s(at_s)

    def unhealthy(self) -> tuple[str, ...]:
        """Return the entities that the agent reports as unhealthy."""
        return tuple(entity for entity, level in self.levels.items() if level == 2)


def is_reported(node: JoinedNode, fault: NodeFault) -> bool:
    return any(node.levels.get(entity) == 2 for entity in fault.entities)
