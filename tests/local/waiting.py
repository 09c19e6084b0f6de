"""Wait for an event, and fail at a deadline with a description of the event."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = (0.01, 0.1)  # seconds between two polls: at first, and at most
START_S = 90.0  # for the first step: imports of torch by several processes at once, on two busy cores
WAIT_S = 60.0  # the limit for everything else
GONE_S = 15.0  # the limit for the processes of a run, after its end

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str | Callable[[], str], limit_s: float, pidfd: int = -1) -> T:
    """Return the first result of `look` that is not None; poll at once when the process of `pidfd` ends.

    The interval grows with a tenth of the time waited, because polling also takes the run's time.
    """
    began = time.monotonic()
    deadline = began + limit_s
    while True:
        found = look()
        if found is not None:
            return found
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}")
        pause_s = min(max(POLL_S[0], (now - began) / 10), POLL_S[1])
        select.select([pidfd] if pidfd >= 0 else [], [], [], pause_s)
