"""Measures how long a watched node has had no findings. Pure.

This decides when the node may return to service. Time without a running agent is no evidence of health, so
the count restarts after a long gap and pauses during a short one, such as a restart of the agent. Without the
pause, an agent that exits soon after each start would count hours during which nothing was watched. Time
during which the fault could not have been seen is no evidence either, so the count also pauses while a sensor
that reported the newest findings is blind or missing, and while an operator has released the GPUs. It is 0
while the loss of the saved state is a finding, because the agent may have known of a fault that no sensor
reports again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from holdfast.node_report import AGENT, INJECTED
from nodeagent.model import KERNEL_LOGS, STATE_LOST, HealthFinding, Level

Names = frozenset[str]

GAP_S = 180.0  # the state is saved every minute, and an upgrade of the agent takes about a minute


@dataclass(frozen=True, slots=True)
class CleanTime:
    """The agent times from which the clean times are counted; None if unknown."""

    watched_s: float | None = None  # the time since which all sensors have been watching
    unhealthy_s: float | None = None  # the last time that anything was unhealthy
    found_s: float | None = None  # the last time that there was any finding
    # How long each of the two counts has paused: without unhealthy findings, and without any findings.
    paused_s: tuple[float, float] = (0.0, 0.0)
    # The sensors that each count needs: the sensors that reported the newest unhealthy findings; for the
    # second count, also the sensors that reported the newest findings of any level.
    needs: tuple[Names, Names] = (frozenset(), frozenset())
    # The next three are not saved.
    at_s: float | None = None  # the time of the last cycle, or of the last save before the restart
    blind: Names = frozenset()  # the sensors that could not measure at that time
    is_resumed: bool = False  # there has been no cycle since the restart

    def after(
        self,
        now_s: float,
        findings: Iterable[HealthFinding],
        ready: bool,
        *,
        released: bool = False,
        blind: Collection[str] = (),
    ) -> CleanTime:
        """Return the times after a cycle.

        Args:
            ready: True if every sensor has been tried.
            released: True if the GPUs were released at some time since the last cycle.
            blind: The sensors that cannot measure now.
        """
        found = [each for each in findings if each.level is not Level.HEALTHY]
        unhealthy = [each for each in found if each.level is Level.UNHEALTHY]
        watched = self._after_a_cycle(now_s, released, frozenset(blind))
        clean_s, quiet_s = watched.paused_s if watched.watched_s is not None else (0.0, 0.0)
        needs = self._needed(0, unhealthy, self.unhealthy_s)
        since_s = now_s if self.watched_s is None and ready else self.watched_s
        return CleanTime(
            None if any(each.check == STATE_LOST for each in found) else since_s,
            now_s if unhealthy else self.unhealthy_s,
            now_s if found else self.found_s,
            (0.0 if unhealthy else clean_s, 0.0 if found else quiet_s),
            (needs, needs | self._needed(1, found, self.found_s)),
            now_s,
            frozenset(blind),
        )

    def _after_a_cycle(self, now_s: float, released: bool, blind: Names) -> CleanTime:
        """Return the times; add the time since the last cycle to the pauses if the counts were paused."""
        if self.at_s is None:
            return self
        for_s, unseen = now_s - self.at_s, self.blind | blind
        if self.is_resumed:
            return self._paused(for_s, for_s)
        clean, quiet = (released or not unseen.isdisjoint(each) for each in self.needs)
        return self._paused(for_s if clean else 0.0, for_s if quiet else 0.0)

    def _needed(self, at: int, found: Sequence[HealthFinding], last_s: float | None) -> Names:
        """Return the sensors of the newest findings: all that reported any since there last were none."""
        if not found:
            return self.needs[at]
        sources = frozenset(source for each in found for source in each.sources)
        is_first = self.at_s is not None and last_s != self.at_s
        return sources if is_first else sources | self.needs[at]

    def resumed(self, last_s: float, now_s: float, released_until_s: float = -inf) -> CleanTime:
        """Return the times saved at `last_s`, except for times that a gap has invalidated.

        A short gap, or a gap explained by a release of the GPUs, invalidates nothing. The time from the save
        to the first cycle does not count, and neither does the time until the needed sensors have been read.
        """
        explained_s = max(last_s, min(released_until_s, now_s))
        if not (last_s <= now_s and now_s - explained_s <= GAP_S):
            return replace(self, watched_s=None)
        return replace(self, at_s=last_s, is_resumed=True)

    def with_sensors(self, names: Collection[str]) -> CleanTime:
        """Return the times of an agent with these sensors.

        If the agent now reads the kernel log in another way, it needs that sensor in place of the old one.
        """
        log = next((each for each in KERNEL_LOGS if each in names), None)
        if log is None:
            return self
        clean, quiet = (frozenset(log if n in KERNEL_LOGS else n for n in each) for each in self.needs)
        return replace(self, needs=(clean, quiet))

    def missing(self, names: Collection[str]) -> Names:
        """Return the needed sensors that are not among `names`."""
        return (self.needs[0] | self.needs[1]) - {*names, AGENT, INJECTED}

    def _paused(self, clean_for_s: float, quiet_for_s: float) -> CleanTime:
        clean_s, quiet_s = self.paused_s
        return replace(self, paused_s=(clean_s + clean_for_s, quiet_s + quiet_for_s))

    def as_json(self, now_s: float) -> dict[str, float | None]:
        """Return the times without unhealthy findings, without findings, and since the last unhealthy one."""
        ended_s = self.unhealthy_s
        clean_s, quiet_s = self.paused_s
        return {
            "clean_s": self._since(now_s - clean_s, self.unhealthy_s),
            "quiet_s": self._since(now_s - quiet_s, self.found_s),
            "calmed_s": None if ended_s is None else round(max(0.0, now_s - ended_s), 3),
        }

    def needs_as_json(self) -> dict[str, list[str]]:
        """Return the sensors that each of the two times needs, sorted; without them, the time pauses."""
        clean, quiet = self.needs
        return {"clean_needs": sorted(clean), "quiet_needs": sorted(quiet)}

    def _since(self, now_s: float, bad_s: float | None) -> float:
        if self.watched_s is None:
            return 0.0
        began_s = self.watched_s if bad_s is None else max(self.watched_s, bad_s)
        return round(max(0.0, now_s - began_s), 3)

    def dump(self) -> list[float | None]:
        """Return the times as JSON, for `load_clean_time`."""
        return [self.watched_s, self.unhealthy_s, self.found_s]


def load_clean_time(raw: Any, paused_s: Any = (0.0, 0.0), needs: Any = ((), ())) -> CleanTime:
    """Restore the dumped times. Raises ValueError or TypeError if they are malformed."""
    watched_s, unhealthy_s, found_s = (None if each is None else float(each) for each in raw)
    clean_s, quiet_s = (float(each) for each in paused_s)
    clean, quiet = (frozenset(map(str, each)) for each in needs)
    return CleanTime(watched_s, unhealthy_s, found_s, (clean_s, quiet_s), (clean, quiet))
