"""CLOCK_MONOTONIC: common ticks at which periodic threads wake up, and the clock's identity.

Waking a sleeping core takes longer than the work that most of these threads then do. On a virtual machine it
takes milliseconds. With common ticks, a core wakes up once for all of them.

The identity matters because times from two processes are comparable only on the same clock.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

# The shortest wait, as a fraction of a period. So a thread that woke slightly early skips the imminent
# tick.
LEAST = 0.1
# How late a healthy loop can run on a busy machine. Only lateness beyond this is treated as time when the
# process did not run.
NORMAL_LATENESS_S = 0.1


def seconds_to_next_tick(period_s: float, now_s: float | None = None) -> float:
    """Return the seconds until the next common tick of `period_s`. An imminent tick is skipped (`LEAST`)."""
    if period_s <= 0:
        return 0.0
    left = period_s - (time.monotonic() if now_s is None else now_s) % period_s
    return left if left > LEAST * period_s else left + period_s


def boot_id() -> str:
    """Return the id of the current boot of the kernel. Raises `OSError`."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity() -> str:
    """Return a string that identifies this clock by boot and time namespace; "" if unknown."""
    with suppress(OSError):
        boot = boot_id()
        namespace = ""
        with suppress(OSError):  # a kernel without time namespaces has a single clock
            namespace = str(Path("/proc/self/ns/time").readlink())
        return f"{boot} {namespace}".strip()
    return ""
