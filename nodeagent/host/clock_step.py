"""Jumps of the wall clock, told from its slewing. Pure but for `take`.

The kernel slews CLOCK_REALTIME and CLOCK_BOOTTIME by the same factor, and counts sleep into both: what is
between them changes only when somebody sets the clock, or by a leap second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

TRIES = 5
CLOSE_S = 1e-4  # two clocks that were read within this are taken at once
LOOSE_S = 0.1  # what was read in more says nothing: the machine stood still in between

Sample = tuple[float, float, float]  # CLOCK_BOOTTIME before, the wall clock, CLOCK_BOOTTIME after


def take() -> list[Sample]:
    """Read the clocks, a few times if something came between."""
    found: list[Sample] = []
    while len(found) < TRIES:
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        wall = time.clock_gettime(time.CLOCK_REALTIME)
        found.append((before, wall, time.clock_gettime(time.CLOCK_BOOTTIME)))
        if found[-1][2] - before <= CLOSE_S:
            break
    return found


def offset(samples: Sequence[Sample]) -> float | None:
    """Return wall clock minus CLOCK_BOOTTIME by the sample that was read fastest; None if none was fast."""
    if not samples:
        return None
    before, wall, after = min(samples, key=lambda each: each[2] - each[0])
    return wall - (before + after) / 2 if 0 <= after - before <= LOOSE_S else None


def step(before: float | None, now: float) -> float:
    """Return by how much the wall clock has jumped between two offsets, in seconds; 0 at first."""
    return 0.0 if before is None else abs(now - before)
