"""Agent time: seconds that never go back, and that continue across restarts of the agent and the node.

Within a boot, agent time is CLOCK_BOOTTIME plus an offset that was fixed when the agent first saw the boot,
so neither a change of the wall clock nor a restart of the agent affects it. At a new boot, the offset is
derived from the wall clock. If the wall clock is ahead, agent time stays ahead, so the time while the node
was off never counts towards a hold time (`events`). People may read agent time as roughly the time since
1970; the logic only compares it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.process.clock import boot_id

_SLACK_S = 1.0  # between the last saved event of a boot and the first event of the next


@dataclass(frozen=True, slots=True)
class Anchor:
    """The offset that defines agent time for one boot."""

    boot_id: str
    offset_s: float  # agent time minus CLOCK_BOOTTIME


def anchor(before: Anchor | None, last_s: float, boot_id: str, boottime_s: float, wall_s: float) -> Anchor:
    """Return the anchor to use. Pure.

    Args:
        before: The saved anchor; None at the first start.
        last_s: The greatest saved agent time; 0 at the first start.
        boot_id: The id of the current boot.
        boottime_s: CLOCK_BOOTTIME now.
        wall_s: Seconds since 1970 now, from a clock that may be wrong.
    """
    if before is not None and before.boot_id == boot_id:
        return before
    # Every time in the new boot is later than every time in the old one, even if the clock was set back.
    return Anchor(boot_id, max(wall_s - boottime_s, last_s + _SLACK_S))


class Clock:
    """The clock of agent time, for one anchor."""

    def __init__(self, at: Anchor) -> None:
        self.anchor = at

    def now_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) + self.anchor.offset_s

    def from_monotonic(self, monotonic_s: float) -> float:
        """Return the agent time of a CLOCK_MONOTONIC reading, such as the kernel log's stamps."""
        suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
        # Rounded, because the clocks are read one after the other and equal stamps must give equal times.
        return monotonic_s + round(suspended_s, 2) + self.anchor.offset_s


def begin(before: Anchor | None, last_s: float) -> Clock:
    """Return the clock of the current boot. Raises OSError without /proc."""
    return Clock(anchor(before, last_s, boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()))
