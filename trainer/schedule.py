"""The learning rate over a run: linear warm-up, then half a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable

FLOOR = 0.1  # the factor at the end of the run


def warmup_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Return a function for `LambdaLR`, from the step to the factor of the peak learning rate.

    The factor rises linearly to 1 in `warmup` steps, starting above 0, then falls to `FLOOR` at `steps` and
    stays there. The function is pure, so a resumed run has the same schedule.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
