"""CLOCK_MONOTONIC: common ticks at which waiting threads wake up, and the identity of the clock.

Waking a sleeping core costs more than the work of most of these threads: on virtual machines it takes
milliseconds. With common ticks, a core wakes up once for all of them. Times from two processes are comparable
only if both have the same clock.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

LEAST = 0.1  # the shortest wait, as a fraction of a period: a thread that woke early skips the imminent tick


def seconds_to_next_tick(period_s: float, now_s: float | None = None) -> float:
    """Return the seconds until the next common tick of `period_s`, skipping an imminent one (`LEAST`)."""
    if period_s <= 0:
        return 0.0
    left = period_s - (time.monotonic() if now_s is None else now_s) % period_s
    return left if left > LEAST * period_s else left + period_s


def boot_id() -> str:
    """Return the identity of this boot of the kernel. Raises `OSError`."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity() -> str:
    """Return a string shared by all processes with this clock: boot and time namespace; "" if unknown."""
    with suppress(OSError):
        boot = boot_id()
        namespace = ""
        with suppress(OSError):  # a kernel without time namespaces has a single clock
            namespace = str(Path("/proc/self/ns/time").readlink())
        return f"{boot} {namespace}".strip()
    return ""
