"""What every sensor is: something that is opened, read repeatedly, and may fail at any time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nodeagent.model import Observation

# How long, approximately, a sensor waits for events (see `left_s`): the watchdog allows no more. It is half
# of the period of the sensors that read files, so that all wake up at the same few moments.
WAIT_S = 2.5


class Unavailable(Exception):
    """The sensor sees nothing now; the message gives the reason and the remedy. It is tried again.

    `nothing_there`: the node has nothing that the sensor could look at, so nothing is missed.
    """

    def __init__(self, why: str, *, nothing_there: bool = False) -> None:
        super().__init__(why)
        self.nothing_there = nothing_there


class Sensor(Protocol):
    """Runs in a thread of its own, so it may block; no other thread calls it.

    `read` is called every `period_s` seconds, on the beat, or repeatedly without a pause if that is 0; then
    it waits for about `WAIT_S` itself. It returns what it has seen since the last call, with times from the
    clock it was created with. The watchdog reports a call that does not return.
    """

    name: str
    period_s: float

    def open(self) -> None:
        """Prepare for `read`. Raises Unavailable; may be called again after that, and after `close`."""

    def read(self) -> Iterable[Observation]:
        """Return what is new.

        Raises Unavailable if it sees nothing any more: then it is closed and reopened.
        """

    def close(self) -> None:
        """Release everything. Never raises, and may be called twice."""


@dataclass(frozen=True, slots=True)
class Omission:
    """Something that is not looked at, and why. It is reported, but is not a fault of the node."""

    what: str  # a check, or an entity
    why: str
