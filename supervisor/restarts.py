"""When is a part that died started again? At once, unless it died young or keeps failing. Pure: the clock is
an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

YOUNG_S = 1.0  # a part that dies at its start is tried once in this time, not in a loop
WELL_S = 10.0  # one that lived so long has not failed at its start
LONGEST_S = 30.0  # between two starts of a part that fails each time
ROW_S = 4 * LONGEST_S  # failures further apart have nothing to do with each other
LOOP = 3  # failures in a row that are no accident any more


@dataclass(slots=True)
class Restarts:
    """The parts that wait for their next start. Times are of one monotonic clock, in seconds."""

    _due: list[tuple[float, str]] = field(default_factory=list)
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)  # in a row, and when the last was

    def died(self, part: str, born_s: float, now_s: float, failed: bool = False) -> float:
        """Have `part` started again, and return in how many seconds.

        No sooner than `YOUNG_S` after it was born; one that has `failed`, that is ended of itself and not by
        somebody's SIGKILL, waits twice as long each time that it did not live for `WELL_S`.
        """
        before, last_s = self._failures.get(part, (0, now_s))
        in_a_row = before if now_s - last_s < ROW_S else 0
        failures = in_a_row + 1 if failed and now_s - born_s < WELL_S else 0
        self._failures[part] = failures, now_s
        pause_s = min(LONGEST_S, YOUNG_S * 2 ** min(failures - 1, 10)) if failures > 1 else 0.0
        at_s = max(now_s + pause_s, born_s + YOUNG_S)
        self._due = [(due_s, other) for due_s, other in self._due if other != part] + [(at_s, part)]
        return at_s - now_s

    def waits(self, part: str) -> bool:
        """True when a next start of `part` is due later."""
        return any(other == part for _, other in self._due)

    def failures(self, part: str) -> int:
        """Return how often in a row `part` has failed young."""
        return self._failures.get(part, (0, 0.0))[0]

    def take(self, now_s: float) -> tuple[str, ...]:
        """Return the parts whose time has come, once each."""
        ready = tuple(part for at_s, part in self._due if at_s <= now_s)
        self._due = [(at_s, part) for at_s, part in self._due if at_s > now_s]
        return ready
