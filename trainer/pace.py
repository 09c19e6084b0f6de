"""Gives steps a minimum duration, so that a run of a small model does not end before a drill."""

from __future__ import annotations

import math


class Pace:
    """Determines when the next step may begin. Times are in seconds, on one monotonic clock."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._last_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Return how long to wait at the end of a step. The next step begins when this wait ends."""
        left_s = max(0.0, self._last_s + self._step_s - now_s)
        self._last_s = now_s + left_s
        return left_s
