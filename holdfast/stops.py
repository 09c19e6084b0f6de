"""Which processes has somebody stopped (state T)? Pure: readings and clock are arguments.

A rank that is stopped does nothing until it is continued, whatever it was at and however long that may take.
One reading proves little: a machine that was suspended, or a job that was stopped and continued as a whole,
finds this process running a moment before the others. So a process counts once it is found stopped at every
reading for a while in which the one who reads ran himself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

STOPPED_S = 1.5  # from the first reading to the one that counts: three readings, a second apart
LATE_S = 1.5  # from one reading to the next: beyond it the reader itself did not run


@dataclass(slots=True)
class Stops:
    """Since when each process has been found stopped, on the clock of `later`."""

    _since_s: dict[int, float] = field(default_factory=dict)
    _read_s: float = 0.0

    def later(self, stopped: Iterable[int], now_s: float) -> frozenset[int]:
        """Take a reading: the pids that are stopped at `now_s`. Return those that have been so for long."""
        known = self._since_s if now_s - self._read_s <= LATE_S else {}
        self._since_s = {pid: known.get(pid, now_s) for pid in stopped}
        self._read_s = now_s
        return frozenset(pid for pid, since_s in self._since_s.items() if now_s - since_s >= STOPPED_S)
