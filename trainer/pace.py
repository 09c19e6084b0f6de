"""Gives steps a minimum duration, so that a run of a small model does not end before a drill."""

from __future__ import annotations

import math


class Pace:
    """Determines when the next step may begin. Times are in seconds, on one monotonic clock."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._last_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Return how long to wait at the beginning of a step, which is timed from the end of that wait.

        The wait belongs to the step: after a fault during a wait behind the commit, that wait would be
        repeated, from an older snapshot.
        """
        left_s = max(0.0, self._last_s + self._step_s - now_s)
        self._last_s = now_s + left_s
        return left_s
