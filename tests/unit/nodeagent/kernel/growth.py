"""Measures how the time of a function grows with its input, as a ratio independent of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(work: Callable[[int], object], short: int, long: int) -> float:
    """Return how many times longer `work(long)` takes than `work(short)`; at best `long / short`.

    Each time is the best of a few, in CPU time of this thread, so other processes do not count.
    """
    return _best_s(work, long) / max(
        _best_s(work, short), 20e-6
    )  # a shorter time is noise of the call itself


def _best_s(work: Callable[[int], object], size: int) -> float:
    found = []
    for _ in range(3):
        began = time.thread_time()
        work(size)
        found.append(time.thread_time() - began)
    return min(found)
