"""The protocol of all sensors: a sensor is opened, read repeatedly, and may fail at any time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nodeagent.model import Observation

# About how long a sensor waits for events: until the next multiple of this period (`seconds_to_next_tick`).
# The watchdog would report a longer wait. It is half the period of the sensors that read files, so that all
# sensors wake up at the same few moments.
WAIT_S = 2.5


class Unavailable(Exception):
    """The sensor is currently blind; the message gives the reason and the remedy. The agent reopens it later.

    `nothing_there` is True if the sensor is blind only because the node has nothing for it to observe.
    """

    def __init__(self, why: str, *, nothing_there: bool = False) -> None:
        super().__init__(why)
        self.nothing_there = nothing_there


class Sensor(Protocol):
    """Runs in a separate thread, so it may block; no other thread calls it.

    `read` is called every `period_s` seconds, at multiples of the period. If the period is 0, `read` is
    called repeatedly without a pause, and waits for about `WAIT_S` itself. It returns the observations since
    the last call, with times from the sensor's clock. The watchdog reports a call that does not return.
    """

    name: str
    period_s: float

    def open(self) -> None:
        """Prepare for `read`. Raises Unavailable; may be called again after that, and after `close`."""

    def read(self) -> Iterable[Observation]:
        """Return the new observations.

        Raises Unavailable if the sensor has become blind; the sensor is then closed and reopened.
        """

    def close(self) -> None:
        """Release everything. Never raises, and may be called twice."""


@dataclass(frozen=True, slots=True)
class Omission:
    """A check or entity that the sensor omits, and why. It is reported, but is not a fault of the node."""

    what: str  # a check, or an entity
    why: str
    is_open: bool = False  # it may be resolved in time, so a short run has not evaluated it
