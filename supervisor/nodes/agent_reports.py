"""Remember when each agent's report changed, by this process's clock, and add the reports to the nodes. Pure.

A report's age does not depend on the clock of the node: it is the time since this process saw it change. If
a report existed before this process started, its age is unknown: the agent may have been silent for days.
Such a report is not used. The node is treated as unknown until the agent writes its next report, within 30 s.

The wall clock of this process is compared with those of all nodes together (`clock_error`), because the times
that it stores on the nodes end operators' releases and nodes' histories, even after it has died.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high, median_low

from supervisor.nodes.node_objects import KnownNode, parsed_report
from supervisor.quarantine import evidence, reports
from supervisor.quarantine.model import NodePolicy, NodeView, Report
from supervisor.quarantine.reports import Machine, Received

RECENT_S = 86400.0  # only recoveries within this time matter; no policy remembers a storm for longer
MAX_SENDERS = 4  # machines that report under one name; two are already an alert
# A difference between clocks that is no reason to doubt them: far more than a report takes to arrive, and far
# less than any time that a stored time decides about.
MAX_SKEW_S = 120.0
AGREE_S = 60.0  # the clocks of nodes that agree differ by at most this
MIN_CLOCKS = 3  # with fewer nodes, nothing shows which clock is wrong
STEADY_S = (
    30.0  # a correction changes only if it is wrong by more, so that no stored time becomes later than now
)


@dataclass(slots=True)
class _Heard:
    """What is known about one node's reports. `seen_s` is when this process first saw the node."""

    uid: str
    seen_s: float
    text: tuple[str | None, str]  # the report, and the time that the agent has added
    machine: Machine
    received: list[Received] = field(default_factory=list)  # the newest of each sender
    malformed: str = ""
    verdict: str | None = None
    heard_s: float = -math.inf  # when this process last saw the agent change anything, including its verdict
    # how far this process's wall clock was ahead of the agent's at the newest report; None if unknown
    ahead_s: float | None = None
    # The result for a single sender, which does not depend on the time, and the policy that it applies to
    known: tuple[NodePolicy, Report, float] | None = None


@dataclass(frozen=True, slots=True)
class ClockError:
    """How far this process's wall clock is ahead of the time that decisions use, and what to say about it.

    `why` is not empty if the clock differs from those of the nodes. `is_doubtful` is True if nothing shows
    which clock is right, so that no correction is possible. `is_checked` is False until an agent was heard.
    """

    ahead_s: float = 0.0
    why: str = ""
    is_doubtful: bool = False
    is_checked: bool = True


def clock_error(ahead_s: Sequence[float], before: ClockError) -> ClockError:
    """Return the error of a clock that is ahead of those of the nodes by `ahead_s`, one number for each node.

    Most of the nodes are right if they agree. Without a number, the error is as `before`.
    """
    if not ahead_s:
        return before
    middle_s = min(median_low(ahead_s), median_high(ahead_s), key=abs)
    is_few = len(ahead_s) < MIN_CLOCKS
    if abs(middle_s) <= MAX_SKEW_S:
        return ClockError()
    agree = sum(abs(each - middle_s) <= AGREE_S for each in ahead_s)
    way = "ahead of" if middle_s > 0 else "behind"
    text = f"the supervisor's clock is {abs(middle_s):.0f} s {way} the clocks of {len(ahead_s)} nodes"
    if is_few or 2 * agree <= len(ahead_s):
        return ClockError(0.0, f"{text}, and it is unknown which clock is right: set them", is_doubtful=True)
    is_steady = not before.is_doubtful and abs(middle_s - before.ahead_s) <= STEADY_S
    corrected_s = before.ahead_s if is_steady else middle_s
    return ClockError(corrected_s, f"{text}, whose time is used: set the clock of the supervisor's node")


class AgentReports:
    """The reports of all nodes. `now_s` is a time on a clock that is never set back."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Heard] = {}

    def note(self, node: KnownNode, now_s: float, ahead_s: float | None = None) -> None:
        """Record the current state of a node.

        `ahead_s` is the time since the agent wrote its report, by the clocks of this process and the node.
        """
        heard = self._nodes.get(node.name)
        if heard is None or heard.uid != node.uid:
            machine = Machine(node.boot_id, node.machine_id)
            heard = _Heard(node.uid, now_s, (node.report, node.report_at), machine, verdict=node.verdict)
            self._nodes[node.name] = heard
            return
        if node.verdict != heard.verdict:
            heard.verdict, heard.heard_s = node.verdict, now_s
        if (heard.machine.boot_id, heard.machine.machine_id) != (node.boot_id, node.machine_id):
            booted = heard.machine.boot_id != node.boot_id
            boot_seen_s = now_s if booted else heard.machine.boot_seen_at_s
            heard.machine = Machine(node.boot_id, node.machine_id, boot_seen_s)
            heard.known = None
        text = (node.report, node.report_at)
        if node.report is not None and text != heard.text:
            heard.text, heard.known, heard.heard_s = text, None, now_s
            heard.ahead_s = ahead_s
            _receive(heard, node.name, node.report, now_s)

    def forget(self, name: str) -> None:
        self._nodes.pop(name, None)

    def is_awaited(self, name: str, now_s: float, policy: NodePolicy) -> bool:
        """True if this process has not heard from the node yet, but only because it has just started."""
        heard = self._nodes.get(name)
        return (
            heard is not None
            and not heard.received
            and not heard.malformed
            and now_s - heard.seen_s <= policy.stale_s
        )

    def is_silent(self, name: str, now_s: float, policy: NodePolicy) -> bool:
        """True if this process has not seen the node's agent write anything within `stale_s`, or ever."""
        heard = self._nodes.get(name)
        return heard is None or now_s - heard.heard_s > policy.stale_s

    def clock_error(self, before: ClockError, now_s: float, policy: NodePolicy) -> ClockError:
        """Return the error of this process's wall clock, compared with the agents heard within `stale_s`."""
        recent = (each for each in self._nodes.values() if now_s - each.heard_s <= policy.stale_s)
        return clock_error([each.ahead_s for each in recent if each.ahead_s is not None], before)

    def view(self, node: KnownNode, now_s: float, policy: NodePolicy) -> NodeView:
        """Return the node's view with the newest report, or with the reason why it is refused."""
        view, heard = node.view, self._nodes.get(node.name)
        if view.refused or heard is None:
            return view
        if heard.malformed:
            return replace(view, report=None, silent_s=math.inf, refused=heard.malformed)
        if heard.known is not None and heard.known[0] is policy:
            _, report, at_s = heard.known
            return replace(view, report=report, silent_s=max(0.0, now_s - at_s))
        found = reports.heard(view, heard.machine, heard.received, now_s, policy)
        if found.report is not None and not found.refused and len(heard.received) == 1:
            heard.known = (policy, found.report, heard.received[0].at_s)
        return found


def calm_s(node: KnownNode, changed_s: float, reported_s: float) -> float:
    """Return how long ago a node recovered; inf if long ago or never.

    Call this for a node that this process finds without a fault. The agent's report shows whether the node
    recovered, or whether its agent has only restarted and written new times. A report that still has an
    unhealthy finding is older than the recovery.

    Args:
        changed_s: How old the newest condition without a fault is.
        reported_s: How old the agent's report is.
    """
    if changed_s > RECENT_S or node.report is None:
        return math.inf
    report = stored_report(node)
    if report is None or evidence.unhealthy(report):
        return changed_s
    return reported_s + report.calmed_s


def stored_report(node: KnownNode) -> Report | None:
    """Return the report on a Node, however old it is; None if it cannot be read."""
    if node.report is None:
        return None
    try:
        return reports.read_report(parsed_report(node.report))
    except Exception:  # whatever the report contains, it must not affect the other nodes
        return None


def _receive(heard: _Heard, name: str, text: str, now_s: float) -> None:
    heard.malformed = ""
    try:
        raw = parsed_report(text)
        if raw.get("node", name) != name:
            heard.malformed = f"its report is about node {str(raw.get('node'))[:80]!r}"
            return
        new = Received(name, raw, now_s)
        others = [each for each in heard.received if reports.sender(each) != reports.sender(new)]
    except Exception as error:  # one bad report must not stop the mirroring of all the other nodes
        heard.malformed = f"its report is invalid: {error}"
        return
    heard.received = [*others, new][-MAX_SENDERS:]


def views(
    nodes: Iterable[KnownNode], heard: AgentReports, now_s: float, policy: NodePolicy
) -> dict[str, NodeView]:
    """Return the views of the nodes that belong to the pool, by name."""
    return {each.name: heard.view(each, now_s, policy) for each in nodes if each.is_ours}
