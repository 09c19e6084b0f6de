"""Does a part still do its work? Pure: the clock and the watcher's own lateness are arguments.

The loop of a launcher that carries out orders, and the event loop of a supervisor, give a sign of life every
second. One that gives none has been stopped, or waits for what does not come: the ranks train on, and nobody
could end or replace them. It is not blamed for what holds up the machine: the time in which the watcher
itself did not run does not count, and a process that would run if it were let has a limit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LIMIT_S = 5.0  # five signs in a row, as much as a member may be silent
HELD_UP_S = 60.0  # for one that waits for a core or a disk: beyond it no recovery can be had there either

_HELD_UP = {"R": "runnable", "D": "in a system call that does not return"}
_STATES = {**_HELD_UP, "T": "stopped", "t": "stopped by a debugger", "S": "asleep", "X": "gone", "Z": "dead"}


@dataclass(frozen=True, slots=True)
class HeartbeatSilence:
    """Since when the part has said nothing, and for how much of that time the watcher did not run."""

    heard_s: float = 0.0  # on the clock of `now_s`; 0 while there is no line to it
    late_s: float = 0.0

    def later(self, heard_s: float, now_s: float, late_s: float) -> HeartbeatSilence:
        """Return what is known at `now_s`, for a look that came `late_s` too late."""
        if not heard_s:
            return HeartbeatSilence()
        late_s = max(0.0, min(late_s, now_s - heard_s))  # what lies before its last word is no excuse
        return HeartbeatSilence(heard_s, late_s if heard_s != self.heard_s else self.late_s + late_s)

    def length_s(self, now_s: float) -> float:
        return now_s - self.heard_s - self.late_s if self.heard_s else 0.0


def verdict(silent_s: float, state: str, who: str = "its launcher") -> str:
    """Return why a part that is silent for `silent_s` is given up, "" while it is not.

    `state` is the letter of its process state: proc(5). `who` names the part in the sentence.
    """
    if silent_s <= (HELD_UP_S if state in _HELD_UP else LIMIT_S):
        return ""
    return f"{who} has said nothing for {silent_s:.0f} s and is {doing(state)}"


def doing(state: str) -> str:
    """Return what a process in this state does, in words."""
    return _STATES.get(state, f"in state {state}")


# Which processes has somebody stopped (state T)? Pure: readings and clock are arguments.
#
# A rank that is stopped does nothing until it is continued, whatever it was at and however long that may
# take. One reading proves little: a machine that was suspended, or a job that was stopped and continued as a
# whole, finds this process running a moment before the others. So a process counts once it is found stopped
# at every reading for a while in which the one who reads ran himself.


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
