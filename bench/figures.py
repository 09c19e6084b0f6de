"""The few numbers that stand for many. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a sample; all NaN for an empty one. `p90` is the nearest-rank one: a value that occurred."""

    count: int
    median: float
    p90: float
    worst: float
    best: float
    mean: float


def summary(values: Sequence[float]) -> Summary:
    if not values:
        return Summary(0, *[math.nan] * 5)
    return Summary(
        len(values),
        statistics.median(values),
        percentile(values, 90),
        max(values),
        min(values),
        statistics.fmean(values),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed. Needs one value."""
    ordered = sorted(values)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(0, rank - 1)]


def ratio(above: float, below: float) -> float:
    """Return the quotient, NaN where there is none."""
    return above / below if below else math.nan


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope through (x, y); 0 for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    across = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return across / sum((x - mean_x) ** 2 for x, _ in points)
