"""One look at everything that is due: what the sensors that read files do at every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from nodeagent.clock import Clock
from nodeagent.observation import Observation
from nodeagent.periods import Periods
from nodeagent.reading import LeftOut, Reading


class Group(Protocol):
    """Checks that are read together."""

    checks: frozenset[str]

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        """Return readings of the checks in `due`. What cannot be read is left out; never raises OSError."""

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return what the last `read` could not look at."""


class Sweep:
    """Reads the groups of one sensor, each check at its own period."""

    def __init__(
        self,
        source: str,
        step_s: float,
        clock: Clock,
        periods_s: Mapping[str, float],
        groups: Sequence[Group],
    ) -> None:
        """Take the groups; a check without a period in `periods_s` is not read."""
        self._source = source
        self._clock = clock
        known = frozenset[str]().union(*(each.checks for each in groups))
        self._periods = Periods(periods_s, known, step_s)
        self._groups = tuple(each for each in groups if each.checks & self._periods.checks)
        self._left_out: tuple[LeftOut, ...] = ()

    def read(self) -> tuple[Observation, ...]:
        """Return the readings of all that is due now."""
        due = self._periods.due(self._clock.now_s())
        found: list[Observation] = []
        for group in self._groups:
            if wanted := due & group.checks:
                found += self._observed(group, wanted)
        self._left_out = tuple(each for group in self._groups for each in group.left_out())
        return tuple(found)

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return what the last `read` left out. May be called by another thread."""
        return self._left_out

    def _observed(self, group: Group, due: frozenset[str]) -> Iterable[Observation]:
        now_s = self._clock.now_s()  # anew for each: the group before may have taken long
        for each in group.read(due, now_s):
            yield Observation(now_s, each.check, each.entity, self._source, each.value, text=each.text)
