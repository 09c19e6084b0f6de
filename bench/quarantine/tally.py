"""Figures of the simulated year. They are based on the real faults, which the decision never sees."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.quarantine.simulated_node import Node
from supervisor.quarantine.model import NO_NEW_WORK, Drain, Hold, QuarantineAction, Release, Taint

UNCONFIRMED = "not confirmed yet"  # part of the `why` of a hold that waits for a confirmation
SILENT = "its agent was silent"  # why a case is held, if the decision saw no report of it


@dataclass(slots=True)
class Case:
    """A real fault that an agent has reported as unhealthy."""

    node: str
    component: str
    sure: bool  # whether two sources or the driver report it
    reported_s: float
    due_s: float  # when it is confirmed
    out_s: float | None = None
    how: str = ""  # how it was resolved: "taint", "already out", "cordoned" or "passed"
    held: str = ""  # why the node was not taken out when the fault was confirmed
    last_hold: str = ""  # the reason for the newest hold, which is in force until the next decision
    alerted_s: float | None = None  # when an operator was alerted, because the node was not taken out
    ended_s: float | None = None  # when the agent reported that the fault had ended


@dataclass(slots=True)
class Tally:
    """Counts and sums over the whole year."""

    nodes: int
    cases: list[Case] = field(default_factory=list)
    open: dict[str, list[Case]] = field(default_factory=dict)  # by node
    most_out: int = 0
    most_by_us: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    false_h: float = 0.0  # node-hours out because of a taint without a real fault
    proof_h: float = 0.0  # node-hours out after the real fault had ended
    bad_h: float = 0.0  # node-hours out with a real fault
    back_s: list[float] = field(default_factory=list)  # from the agent's first healthy report to the release
    evicted: list[str] = field(default_factory=list)
    _since_s: dict[str, float] = field(default_factory=dict)
    _was_bad: dict[str, bool] = field(default_factory=dict)
    _stay_h: dict[str, float] = field(default_factory=dict)  # healthy node-hours since the taint

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def reported(self, case: Case, node: Node) -> None:
        self.cases.append(case)
        held = node.standing.quarantine
        if held is not None and held.effect == NO_NEW_WORK:
            case.out_s, case.how = case.reported_s, "already out"
        elif node.standing.cordoned:
            case.out_s, case.how = case.reported_s, "cordoned"
        else:
            self.open.setdefault(node.name, []).append(case)

    def passed(self, case: Case, now_s: float) -> None:
        """Note that the fault ended; it counts as passed if the node was not taken out before then."""
        case.ended_s = now_s
        waiting = self.open.get(case.node, [])
        if case in waiting:
            waiting.remove(case)
            case.how = "passed"

    def acted(self, node: Node, action: QuarantineAction, now_s: float) -> None:
        self.count(type(action).__name__.lower())
        if isinstance(action, Drain) and not node.is_bad:
            self.evicted.append(f"{node.name} at {now_s:.0f} s: {action.why}")
        if isinstance(action, Taint) and action.effect == NO_NEW_WORK:
            for case in self.open.pop(node.name, []):
                case.out_s, case.how = now_s, "taint"
                if now_s >= case.due_s and case.last_hold and UNCONFIRMED not in case.last_hold:
                    case.held = case.last_hold
            self._since_s.setdefault(node.name, now_s)
            self._was_bad[node.name] = self._was_bad.get(node.name, False) or node.is_bad
        if isinstance(action, Release):
            self.back_s.append(now_s - node.clean_at_s)
            self.ended(node, now_s)

    def ended(self, node: Node, now_s: float) -> None:
        """Account for the end of a taint, by a release or by an operator."""
        self.account(node, now_s)
        self._since_s.pop(node.name, None)
        well_h = self._stay_h.pop(node.name, 0.0)
        if self._was_bad.pop(node.name, False):
            self.proof_h += well_h
        else:
            self.false_h += well_h

    def account(self, node: Node, now_s: float) -> None:
        """Record the time since the last call. Must be called before each change of a node's real faults."""
        since_s = self._since_s.get(node.name)
        if since_s is None:
            return
        hours = (now_s - since_s) / 3600.0
        if node.is_bad:
            self.bad_h += hours
            self._was_bad[node.name] = True
        else:
            self._stay_h[node.name] = self._stay_h.get(node.name, 0.0) + hours
        self._since_s[node.name] = now_s

    def out(self, out: int, by_us: bool) -> None:
        """Note how many nodes are out. `by_us` is True if a taint was the last to take one out."""
        self.most_out = max(self.most_out, out)
        if by_us:
            self.most_by_us = max(self.most_by_us, out)

    def held(self, holds: tuple[Hold, ...], now_s: float) -> None:
        """Note which faults are held for a reason other than a missing confirmation."""
        for each in holds:
            for case in self.open.get(each.node, ()):
                case.last_hold = each.why
                if now_s >= case.due_s and UNCONFIRMED not in each.why:
                    case.held = each.why
                if each.alert and case.alerted_s is None:
                    case.alerted_s = now_s
