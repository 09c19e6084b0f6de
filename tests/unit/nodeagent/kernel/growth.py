"""How the time that a piece of work takes grows with its input: no clock of any machine is in the answer."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(work: Callable[[int], object], short: int, long: int) -> float:
    """Return how many times longer `work(long)` takes than `work(short)`; at best `long / short`.

    Each time is the best of a few, of this thread's processor: whoever else is busy does not count.
    """
    return _best_s(work, long) / max(_best_s(work, short), 20e-6)  # below that it is the call's own noise


def _best_s(work: Callable[[int], object], size: int) -> float:
    found = []
    for _ in range(3):
        began = time.thread_time()
        work(size)
        found.append(time.thread_time() - began)
    return min(found)
