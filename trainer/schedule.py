"""The learning rate over a run: linear warm-up, then half a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable

FLOOR = 0.1  # of the peak: what is left at the end


def warmup_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate as a function of the step, for `LambdaLR`.

    It climbs to 1 in `warmup` steps, never starting from 0, and falls to `FLOOR` at `steps` and
    after. A pure function of the step, so that a resumed schedule is the schedule.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
