"""A node of the simulated year: its real faults, its agent's reports, its taints and cordons.

Only the simulated world and the tally know the real faults (`truths`); a view of the node does not show them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from nodeagent.agent.recent_faults import RecentFaults
from nodeagent.model import Action, HealthFinding, Level
from supervisor.quarantine import evidence
from supervisor.quarantine.model import NodeFinding, NodeView, Report

HOUR_S, DAY_S = 3600.0, 86400.0
REPORT_S = 30.0  # an agent reports at this interval, and also immediately when something changes
LONG_AGO_S = -30 * DAY_S
FRESH_S = 2 * HOUR_S  # for this long after its last finding, a node's view is rebuilt for each decision


GPUS = 8
# Two sensors that read the same log or counters count as one witness.
ORIGINS = {"kmsg": "driver log", "nvml_events": "driver log", "nvml_poll": "driver state", "sysfs": "sysfs"}


def origins_of(sources: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({ORIGINS.get(each, each) for each in sources}))


@dataclass(frozen=True, slots=True)
class Sign:
    """A finding of an agent, true or false.

    Its key ends in a number; the rest of the key is the same on all nodes.
    """

    key: str
    level: str
    action: str
    sources: tuple[str, ...]
    since_s: float
    driver: bool = False
    lasting: bool = False
    device: str = ""

    @property
    def signature(self) -> str:
        return self.key.rstrip("0123456789")

    def at(self, report_at_s: float, recent: RecentFaults) -> NodeFinding:
        verdict_by = "driver" if self.driver else ""
        held_s = max(0.0, report_at_s - self.since_s)
        return NodeFinding(
            self.key, self.level, self.action, held_s, self.sources, verdict_by, self.lasting,
            f"gpu/{self.device}" if self.device else "", self.signature, origins_of(self.sources),
            self.device, recent_s=recent.of_finding_s(self.as_finding(), report_at_s),
        )  # fmt: skip

    def as_finding(self) -> HealthFinding:
        """Return the finding for the agent's sums, which all faults with its signature share."""
        return _finding(self.signature, self.level)


@cache
def _finding(signature: str, level: str) -> HealthFinding:
    is_bad = level == "unhealthy"
    return HealthFinding(
        "",
        signature,
        None,
        Level.UNHEALTHY if is_bad else Level.DEGRADED,
        Action.NONE,
        0.0,
        0.0,
        "",
        (),
        "",
        (),
    )


class Node:
    """One node and its agent. Mutable; times are simulated."""

    def __init__(self, name: str, rack: str, phase_s: float, lemon: bool) -> None:
        self.standing = NodeView(name, rack=rack, busy=True)
        self.phase_s = phase_s  # offset of its reports within `REPORT_S`
        self.lemon = lemon
        self.truths: set[str] = set()  # real faults
        self.signs: dict[str, Sign] = {}
        self.agent = "1"
        self.boots = 1
        self.gpus = tuple(f"{name}-{at}" for at in range(GPUS))
        self.changed_s = LONG_AGO_S  # when the agent's findings last changed
        self.clean_at_s = LONG_AGO_S
        self.quiet_at_s = LONG_AGO_S
        self.calmed_at_s = -math.inf
        self.cut_off = 0  # number of reasons why the agent is silent
        self._recent = RecentFaults()
        self._last = Report()
        self._last_at_s = LONG_AGO_S

    @property
    def name(self) -> str:
        return self.standing.name

    @property
    def is_bad(self) -> bool:
        return bool(self.truths)

    @property
    def is_ill(self) -> bool:
        """True if the node's agent reports it as unhealthy."""
        return any(sign.level == "unhealthy" for sign in self.signs.values())

    def has_news_since(self, _at_s: float) -> bool:
        """Return True if a fault has occurred again since then. Here, each fault has its own key."""
        return False

    # -- the agent

    def found(self, sign: Sign, now_s: float) -> None:
        self._note(now_s)
        self.signs[sign.key] = sign
        self.changed_s = now_s
        self._note(now_s)

    def _note(self, now_s: float) -> None:
        self._recent = self._recent.after(now_s, (each.as_finding() for each in self.signs.values()))

    def cleared(self, key: str, now_s: float) -> None:
        self._note(now_s)
        sign = self.signs.pop(key, None)
        if sign is None:
            return
        self.changed_s = now_s
        self._note(now_s)
        if not self.signs:
            self.quiet_at_s = now_s
        if sign.level == "unhealthy" and not self.is_ill:
            self.clean_at_s = self.calmed_at_s = now_s

    def booted(self, now_s: float) -> None:
        self.boots += 1
        self.changed_s = now_s
        self.clean_at_s, self.quiet_at_s = max(self.clean_at_s, now_s), max(self.quiet_at_s, now_s)

    def exchanged(self, gpu: str) -> None:
        """Replace a GPU with another one."""
        self.gpus = tuple(f"{each}'" if each == gpu else each for each in self.gpus)

    def hush(self, now_s: float) -> None:
        """Silence the agent for one more reason.

        It reports again once `speak` has been called for each reason.
        """
        if not self.cut_off:
            self._last_at_s = self._heard_at_s(now_s)
            self._last = self._report(self._last_at_s)
        self.cut_off += 1

    def speak(self, now_s: float) -> None:
        self.cut_off -= 1
        if not self.cut_off:
            self.changed_s = now_s

    # -- views

    def view(self, now_s: float) -> NodeView:
        at_s = self._last_at_s if self.cut_off else self._heard_at_s(now_s)
        report = self._last if self.cut_off else self._report(at_s)
        shown = self.standing
        return NodeView(  # `replace` would take three times as long, and there are millions of calls
            shown.name, report, now_s - at_s, shown.rack, shown.quarantine, shown.waiver, shown.cordoned,
            shown.ready, shown.busy, shown.history, shown.released_at_s, shown.version,
        )  # fmt: skip

    def is_plain(self, now_s: float) -> bool:
        """Return whether a view of the node stays valid until its next event."""
        shown = self.standing
        marked = shown.quarantine or shown.waiver or shown.cordoned or not shown.ready
        is_fresh = now_s - self.calmed_at_s < FRESH_S or self._recent.of_node_s(now_s) >= evidence.UNSTEADY_S
        return not (marked or self.signs or self.cut_off or is_fresh)

    def _heard_at_s(self, now_s: float) -> float:
        beat_s = math.floor((now_s - self.phase_s) / REPORT_S) * REPORT_S + self.phase_s
        return max(beat_s, self.changed_s)

    def _report(self, at_s: float) -> Report:
        signs = sorted(self.signs.values(), key=lambda each: (each.level != "unhealthy", each.key))
        if signs:
            self._note(at_s)
        return Report(
            tuple(each.at(at_s, self._recent) for each in signs),
            0.0 if self.is_ill else at_s - self.clean_at_s,
            0.0 if signs else at_s - self.quiet_at_s,
            at_s - self.calmed_at_s,
            str(self.boots),
            self.agent,
            (),
            self.gpus,
            unsteady_s=self._recent.of_node_s(at_s),
        )
