"""How many lines a source of the kernel log has lost, told as the readings of a counter."""

from __future__ import annotations

from nodeagent.clock import Clock
from nodeagent.observation import Observation

REPORT_S = 30.0  # between two readings that are equal: without them it would not be seen that it is over


class Losses:
    """Counts since it was made; `count` is raised by whoever finds that something is missing."""

    def __init__(self, clock: Clock, source: str, text: str) -> None:
        self.count = 0
        self._clock = clock
        self._source = source
        self._text = text
        self._told: tuple[float, int] | None = None

    def told(self) -> list[Observation]:
        """Return a reading if there is one to tell now."""
        now_s = self._clock.now_s()
        if self._told is None:
            return [self._reading(now_s, 0)]  # a counter's growth shows from its second reading on
        at_s, count = self._told
        if count == self.count and now_s - at_s < REPORT_S:
            return []
        return [self._reading(now_s, self.count)]

    def _reading(self, now_s: float, count: int) -> Observation:
        self._told = (now_s, count)
        text = self._text if count else ""
        entity = f"sensor/{self._source}"
        return Observation(now_s, "observations_dropped", entity, self._source, float(count), text=text)
