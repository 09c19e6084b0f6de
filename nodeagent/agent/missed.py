"""Keeps what an agent has seen while its disk hung, to add it to the saved state later. Pure.

Such an agent starts without its saved state, and saves nothing. Its successor loads the state from before,
and its sensors do not report an event again. Events and the readings of changed counters are therefore
kept. Other samples are not needed, because the successor takes its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nodeagent.model import Observation
from nodeagent.policy.rules import HealthPolicy, RuleKind

MAX_KEPT = 10_000


class MissedObservations:
    """The observations of one agent. If there are too many, the newest are dropped and counted."""

    def __init__(self) -> None:
        self._kept: list[Observation] = []
        self._readings: dict[tuple[str, str, str], float] = {}
        self.dropped = 0

    def add(self, seen: Observation, policy: HealthPolicy) -> None:
        if not policy.is_event(seen.check) and not self._has_changed(seen, policy):
            return
        if len(self._kept) < MAX_KEPT:
            self._kept.append(seen)
        else:
            self.dropped += 1

    def _has_changed(self, seen: Observation, policy: HealthPolicy) -> bool:
        rule = policy.rules.get(seen.check)
        if rule is None or rule.kind is not RuleKind.RATE:
            return False
        place = seen.entity, seen.check, seen.source
        before = self._readings.get(place)
        if before is not None or len(self._readings) < MAX_KEPT:
            self._readings[place] = seen.value
        return before != seen.value

    def on_another_clock(self, later_s: float) -> Iterable[Observation]:
        """Yield the observations, for a clock that is ahead of this agent's by `later_s`."""
        return (replace(each, at_s=each.at_s + later_s) for each in self._kept)
