"""Does a part still do its work, and which ranks are stopped? Pure: readings and clock are arguments.

The loop of a launcher that carries out orders, and the event loop of a supervisor, give a sign of life every
second. A part that gives none has been stopped, or waits for what does not come: the ranks train on, and
could be neither ended nor replaced. What holds up the whole machine does not count against it: the time in
which the watcher itself did not run is left out, and a process that only waits for a core has a limit of its
own.

A rank that is stopped (state T) does nothing until it is continued, whatever it was doing and however long
that may take. One reading proves little: a machine that was suspended, or a job that was stopped and
continued as a whole, has the watcher running a moment before the others. So a process counts once it is found
stopped at every reading for a while in which the watcher itself ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LIMIT_S = 5.0  # five signs in a row, as much as a member may be silent
HELD_UP_S = 60.0  # for one that waits for a core or a disk: beyond it no recovery succeeds there either
STOPPED_S = 1.5  # from the first reading to the one that counts: three readings, a second apart
LATE_S = 1.5  # from one reading to the next: beyond it the watcher itself did not run

_HELD_UP = {"R": "runnable", "D": "in a system call that does not return"}
_STATES = {**_HELD_UP, "T": "stopped", "t": "stopped by a debugger", "S": "asleep", "X": "gone", "Z": "dead"}


@dataclass(frozen=True, slots=True)
class HeartbeatSilence:
    """Since when the part has been silent, and for how much of that time the watcher did not run."""

    heard_s: float = 0.0  # on the clock of `now_s`; 0 while there is no connection to it
    late_s: float = 0.0

    def later(self, heard_s: float, now_s: float, late_s: float) -> HeartbeatSilence:
        """Return what is known at `now_s`, for a look that came `late_s` too late."""
        if not heard_s:
            return HeartbeatSilence()
        # lateness before its last sign of life does not count
        late_s = max(0.0, min(late_s, now_s - heard_s))
        return HeartbeatSilence(heard_s, late_s if heard_s != self.heard_s else self.late_s + late_s)

    def length_s(self, now_s: float) -> float:
        return now_s - self.heard_s - self.late_s if self.heard_s else 0.0


def verdict(silent_s: float, state: str, who: str = "its launcher") -> str:
    """Return why a part that is silent for `silent_s` is given up, "" while it is not.

    `state` is the letter of its process state: proc(5). `who` is the part's name in the sentence.
    """
    if silent_s <= (HELD_UP_S if state in _HELD_UP else LIMIT_S):
        return ""
    return f"{who} has said nothing for {silent_s:.0f} s and is {doing(state)}"


def doing(state: str) -> str:
    """Return what a process in this state does, in words."""
    return _STATES.get(state, f"in state {state}")


@dataclass(slots=True)
class Stops:
    """Since when each process has been found stopped, on the clock of `later`."""

    _since_s: dict[int, float] = field(default_factory=dict)
    _read_s: float = 0.0

    def later(self, stopped: Iterable[int], now_s: float) -> frozenset[int]:
        """Take a reading: the pids that are stopped at `now_s`. Return those that count as stopped."""
        known = self._since_s if now_s - self._read_s <= LATE_S else {}
        self._since_s = {pid: known.get(pid, now_s) for pid in stopped}
        self._read_s = now_s
        return frozenset(pid for pid, since_s in self._since_s.items() if now_s - since_s >= STOPPED_S)
