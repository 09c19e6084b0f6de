"""Give steps a minimum duration, to keep a small model's run from ending before a drill."""

from __future__ import annotations

import math


class Pace:
    """Determines when the next step may begin. All times are in seconds on the same monotonic clock."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._last_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Return how long to wait at the beginning of a step. The step's time starts when the wait ends.

        The wait comes at the beginning of a step, not after its commit. If a fault interrupted a wait after
        the commit, the resumed run would repeat that wait, starting from an older snapshot.
        """
        left_s = max(0.0, self._last_s + self._step_s - now_s)
        self._last_s = now_s + left_s
        return left_s
