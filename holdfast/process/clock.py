"""When threads that only wait wake up: all at the same moments.

To wake up a core that sleeps costs more than what most of them do then, on virtual machines milliseconds; one
that is awake does for all of them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

LEAST = 0.1  # of a period: a wait that ends a little early must not end again at once


def seconds_to_next_tick(period_s: float, now_s: float | None = None) -> float:
    """Return the seconds to the next multiple of `period_s` on CLOCK_MONOTONIC, or nearly: see `LEAST`."""
    if period_s <= 0:
        return 0.0
    left = period_s - (time.monotonic() if now_s is None else now_s) % period_s
    return left if left > LEAST * period_s else left + period_s


# Whose CLOCK_MONOTONIC is this? Times of two processes can be compared only if both have the same one.


def identity() -> str:
    """Return what is equal for all who share the clock: the boot, and the time namespace. "" is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = ""
        with suppress(OSError):  # a kernel without time namespaces has one
            namespace = str(Path("/proc/self/ns/time").readlink())
        return f"{boot} {namespace}".strip()
    return ""
