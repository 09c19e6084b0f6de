"""What every sensor is: something that is opened, read repeatedly, and may fail at any time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nodeagent.model import Observation

# About, for a sensor that waits for events (see `beat`): the watchdog waits for no more. Half of the period
# of those that read, so that all wake up at the same few moments.
WAIT_S = 2.5


class Unavailable(Exception):
    """The sensor cannot see now; the message says why and what would change it. It is tried again.

    `nothing_there`: this node has nothing of what the sensor looks at, so nothing is missed.
    """

    def __init__(self, why: str, *, nothing_there: bool = False) -> None:
        super().__init__(why)
        self.nothing_there = nothing_there


class Sensor(Protocol):
    """Runs in a thread of its own, so that it may block; nobody else ever calls it.

    `read` is called every `period_s` seconds, on the beat, or at once again if that is 0, when it waits by
    itself for about `WAIT_S`. It returns what it has seen since the last time, stamped with the time given
    by the clock it was made with. A call that does not return is found by the watchdog and is a finding.
    """

    name: str
    period_s: float

    def open(self) -> None:
        """Get ready. Raises Unavailable; may be called again after that, and after a `close`."""

    def read(self) -> Iterable[Observation]:
        """Return what is new. Raises Unavailable when it can see no more: it is closed and opened anew."""

    def close(self) -> None:
        """Let go of everything. Never raises, and may be called twice."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that is not looked at, and why. It is told, and is no fault of the node."""

    what: str  # a check, or an entity
    why: str
