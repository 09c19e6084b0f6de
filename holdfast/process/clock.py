"""CLOCK_MONOTONIC: ticks at which threads that wait wake up together, and which processes share the clock.

To wake up a core that sleeps costs more than what most of these threads do then, on virtual machines
milliseconds; a core that is awake serves all of them. Times of two processes can be compared only if both
have the same clock.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

LEAST = 0.1  # of a period: after a wait that ended a little early, the next tick is not a moment later


def seconds_to_next_tick(period_s: float, now_s: float | None = None) -> float:
    """Return the seconds to the next multiple of `period_s` on CLOCK_MONOTONIC, or nearly: see `LEAST`."""
    if period_s <= 0:
        return 0.0
    left = period_s - (time.monotonic() if now_s is None else now_s) % period_s
    return left if left > LEAST * period_s else left + period_s


def identity() -> str:
    """Return a text that all processes with this clock share: boot and time namespace; "" if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = ""
        with suppress(OSError):  # a kernel without time namespaces has one
            namespace = str(Path("/proc/self/ns/time").readlink())
        return f"{boot} {namespace}".strip()
    return ""
