"""Knows when the agent itself did not run: a stopped process, a frozen container, a node that swaps. Pure.

Its loop runs every few seconds. If it did not, its sensors did not run either, so how long their calls have
taken says nothing about the driver or a disk. Such time does not count towards the duration of a call.
"""

from __future__ import annotations

from collections import deque
from math import inf

LATE_S = 5.0  # a loop that is later than this did not run; twice the longest time between two cycles
MAX_PAUSES = 64


class LoopPauses:
    """The newest periods in which the loop did not run, in monotonic time."""

    def __init__(self, cycle_s: float) -> None:
        """Take the longest time between two cycles of a loop that runs."""
        self._cycle_s = cycle_s
        self._last = inf  # the last cycle
        self._pauses: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)

    def note_cycle(self, now: float) -> None:
        """Note that a cycle begins. The first cycle ends no pause."""
        if now - self._last > LATE_S:
            self._pauses.append((self._last + self._cycle_s, now))
        self._last = now

    def within_s(self, begin: float, end: float) -> float:
        """Return how long the loop did not run in a period."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self._pauses)
