"""Compare the CPU time that two inputs take, because an absolute time depends on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(small: Callable[[], object], large: Callable[[], object]) -> float:
    """Return how many times as long `large` takes as `small`; the shortest of several tries counts."""
    return _shortest_ns(large) / _shortest_ns(small)


def _shortest_ns(work: Callable[[], object]) -> int:
    def once_ns() -> int:
        begun_ns = time.process_time_ns()
        work()
        return time.process_time_ns() - begun_ns

    return max(1, min(once_ns() for _ in range(5)))
