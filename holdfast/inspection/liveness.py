"""Decide whether a part still responds, and which ranks are stopped. Pure: readings and times are arguments.

The main loop of a launcher and the event loop of a supervisor send a heartbeat every second. If a part's
heartbeats stop, it is stopped or blocked. The ranks keep training, but nothing can end or replace them. A
delay of the whole machine is not the part's fault. So the time when the watcher itself did not run is
excluded, and a part that is only waiting for a core gets a longer limit.

A rank that a signal has stopped (state T) makes no progress until it is continued, so its phase's time limits
do not apply. A single reading does not prove that a rank is stopped. After a machine was suspended, or after
a whole job was stopped and continued, the watcher may run a moment before the other processes. A process
is therefore considered stopped only if every reading over a period finds it stopped, and the watcher itself
ran throughout that period.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LIMIT_S = 5.0  # five consecutive heartbeats, the same limit as for a silent member
# The limit for a part that waits for a core or a disk. If the wait lasts longer, a replacement could not run
# on that machine either.
HELD_UP_S = 60.0
STOPPED_S = 1.5  # less than the time from the first to the last of three readings that are a second apart
LATE_S = 1.5  # if two readings are further apart than this, the watcher itself did not run in between

UNKNOWN = "?"  # the state of a process in another container, which cannot be read
_HELD_UP = {"R": "runnable", "D": "in a system call that does not return", UNKNOWN: "in an unknown state"}
_STATES = {**_HELD_UP, "T": "stopped", "t": "stopped by a debugger", "S": "asleep", "X": "gone", "Z": "dead"}


@dataclass(frozen=True, slots=True)
class HeartbeatSilence:
    """The time since a part's last heartbeat, and for how much of this time the watcher did not run."""

    # When the last heartbeat arrived, on the same clock as `now_s`; 0 if the part is not connected.
    heard_s: float = 0.0
    late_s: float = 0.0

    def later(self, heard_s: float, now_s: float, late_s: float) -> HeartbeatSilence:
        """Return the silence at `now_s`, for a check that ran `late_s` late."""
        if not heard_s:
            return HeartbeatSilence()
        # Only the part of the delay after the last heartbeat counts.
        late_s = max(0.0, min(late_s, now_s - heard_s))
        return HeartbeatSilence(heard_s, late_s if heard_s != self.heard_s else self.late_s + late_s)

    def length_s(self, now_s: float) -> float:
        return now_s - self.heard_s - self.late_s if self.heard_s else 0.0


def verdict(silent_s: float, state: str, who: str = "its launcher") -> str:
    """Return why a part that has been silent for `silent_s` is unresponsive, or "" if it is not.

    `state` is the letter of its process state (see proc(5)), or `UNKNOWN`. `who` names the part in the
    message.
    """
    if silent_s <= (HELD_UP_S if state in _HELD_UP else LIMIT_S):
        return ""
    return f"{who} has sent no heartbeat for {silent_s:.0f} s and is {doing(state)}"


def doing(state: str) -> str:
    """Describe in words what a process in this state is doing."""
    return _STATES.get(state, f"in state {state}")


@dataclass(slots=True)
class Stops:
    """When each stopped process was first observed to be stopped, on the clock of `later`."""

    _since_s: dict[int, float] = field(default_factory=dict)
    _read_s: float = 0.0

    def later(self, stopped: Iterable[int], now_s: float) -> frozenset[int]:
        """Record the pids that are stopped at `now_s`, and return those that are considered stopped."""
        known = self._since_s if now_s - self._read_s <= LATE_S else {}
        self._since_s = {pid: known.get(pid, now_s) for pid in stopped}
        self._read_s = now_s
        return frozenset(pid for pid, since_s in self._since_s.items() if now_s - since_s >= STOPPED_S)
