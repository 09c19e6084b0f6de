"""Steps that take at least so long: drills need time between them, and a fast machine leaves none."""

from __future__ import annotations

import math


class Pace:
    """When the next step may begin. Times are of one monotonic clock, in seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._last_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Return for how long to wait at the end of a step; the next one is counted from then."""
        left_s = max(0.0, self._last_s + self._step_s - now_s)
        self._last_s = now_s + left_s
        return left_s
