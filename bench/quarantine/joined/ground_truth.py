"""What the joined year knows about each node's real faults, and what happens to the reports about them.

A case begins when the agent first reports a real fault as unhealthy. If the agent then stops reporting the
fault before a remedy has ended it, the report is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from bench.quarantine.joined.faults import NodeFault
from bench.quarantine.joined.node import JoinedNode, is_reported
from bench.quarantine.simulated_pool import Pool
from bench.quarantine.tally import SILENT, Case

SECOND_S = 15.0  # the second witness is NVML's next poll at the latest
LATE_S = 60.0  # a fault must be reported within its rule's time plus this

CasePlace = tuple[str, str]  # node, key of the fault


@dataclass(slots=True)
class Truth:
    """Opens and closes the cases of all faults, and notes what was lost, missed or hidden."""

    pool: Pool
    cases: dict[CasePlace, Case] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)
    first_sign_s: list[float] = field(default_factory=list)  # from the fault to its first unhealthy report
    repeats: int = 0  # cases with a key that the node has had before
    _known: set[CasePlace] = field(default_factory=set)
    _began_s: dict[CasePlace, float] = field(default_factory=dict)
    _entities: dict[CasePlace, tuple[str, ...]] = field(default_factory=dict)

    def began(self, node: JoinedNode, fault: NodeFault) -> None:
        """Note that a fault's symptoms begin. Call this before the machine changes."""
        self.pool.touch(node)
        if not fault.kind.degraded:
            node.truths.add(fault.key)
            self._began_s[node.name, fault.key] = self.pool.now_s
            self.pool.after(
                fault.kind.unhealthy_s + LATE_S, partial(self._check_reported, node, fault, fault.shows)
            )

    def _check_reported(self, node: JoinedNode, fault: NodeFault, show: int) -> None:
        """Note a fault that the agent has not reported, although it has run for long enough."""
        if fault.shows != show or not fault.is_active or fault.is_dormant or fault not in node.faults:
            return
        patience_s = fault.kind.unhealthy_s + LATE_S
        ran_s = self.pool.now_s - node.started_s if node.daemon.runs else 0.0
        if ran_s < patience_s:
            self.pool.after(patience_s - ran_s, partial(self._check_reported, node, fault, show))
        elif (node.name, fault.key) not in self.cases:
            self.unreported.append(f"{node.name} at {self.pool.now_s:.0f} s: {fault.key}")

    def ended(self, node: JoinedNode, fault: NodeFault) -> None:
        """Note that a fault has ended, either by a remedy or on its own."""
        self.pool.touch(node)
        fault.is_active = False
        self._began_s.pop((node.name, fault.key), None)
        node.truths.discard(fault.key)
        node.faults.remove(fault)
        self.examine(node)

    def knows(self, node: JoinedNode, fault: NodeFault, at_s: float) -> bool:
        """Return True if the fault had been reported by then."""
        case = self.cases.get((node.name, fault.key))
        return case is not None and case.reported_s <= at_s

    def examine(self, node: JoinedNode) -> None:
        """Compare the agent's new findings with the faults."""
        now_s = self.pool.now_s
        shown = {fault.key: fault for fault in node.faults if not fault.kind.degraded}
        for key, fault in shown.items():
            place = (node.name, key)
            if place not in self.cases and is_reported(node, fault) and not fault.is_dormant:
                self._open(node, fault)
        for place, case in list(self.cases.items()):
            if place[0] != node.name or not node.daemon.runs:
                continue
            found = shown.get(place[1])
            entities = self._entities[place]
            if any(node.levels.get(entity) == 2 for entity in entities):
                continue
            if found is not None and not found.is_dormant:
                self.losses.append(f"{node.name} at {now_s:.0f} s: {place[1]} is no longer reported")
            del self.cases[place]
            self.pool.tally.passed(case, now_s)

    def _open(self, node: JoinedNode, fault: NodeFault) -> None:
        policy, now_s, place = self.pool.policy, self.pool.now_s, (node.name, fault.key)
        sure = fault.witnesses > 1
        wait_s = policy.confirm_s + SECOND_S if sure else policy.confirm_alone_s
        case = Case(node.name, fault.kind.component, sure, now_s, now_s + wait_s)
        if node.cut_off:
            case.held = SILENT
        self.pool.tally.reported(case, node)
        self.cases[place], self._entities[place] = case, fault.entities
        self.first_sign_s.append(now_s - self._began_s.get(place, now_s))
        self.repeats += place in self._known
        self._known.add(place)
