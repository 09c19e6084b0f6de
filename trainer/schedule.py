"""Compute the learning rate over a run: a linear warm-up, then half a period of a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable

FLOOR = 0.1  # the factor at the end of the run


def warmup_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Return a function for `LambdaLR` that maps a step to a factor of the peak learning rate.

    The factor starts above 0, rises linearly to 1 in `warmup` steps, falls to `FLOOR` at `steps`, and then
    stays there. The function is pure, so a resumed run has the same schedule.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
