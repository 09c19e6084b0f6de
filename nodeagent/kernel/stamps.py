"""When a line was written: the log's own clock against the system's. Pure but for the two clocks.

The log is stamped by the processor's counter as it is. CLOCK_MONOTONIC is the same counter slewed by NTP, and
runs away from it by seconds a day: what other sensors saw at the same moment would seem to come before or
after. CLOCK_MONOTONIC_RAW is not slewed, so how far it is off tells how far the stamps are.
"""

from __future__ import annotations

import time


def monotonic_s(stamp_s: float, monotonic_now_s: float, raw_now_s: float) -> float:
    """Return the CLOCK_MONOTONIC reading at a stamp: the slew of the whole time since boot, in proportion."""
    if raw_now_s <= 0:
        return stamp_s
    return min(stamp_s * (monotonic_now_s / raw_now_s), monotonic_now_s)


def slew() -> tuple[float, float]:
    """Return both clocks' readings, for `monotonic_s`."""
    return time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
