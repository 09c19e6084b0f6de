"""When is a part that died started again? At once, unless it died young. Pure: the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

YOUNG_S = 1.0  # a part that fails at its start is tried once in this time, not in a loop


@dataclass(slots=True)
class Restarts:
    """The parts that wait for their next start. Times are of one monotonic clock, in seconds."""

    _due: list[tuple[float, str]] = field(default_factory=list)

    def died(self, part: str, born_s: float, now_s: float) -> None:
        """Have `part` started again, no sooner than `YOUNG_S` after it was born."""
        self._due.append((max(now_s, born_s + YOUNG_S), part))

    def take(self, now_s: float) -> tuple[str, ...]:
        """Return the parts whose time has come, once each."""
        ready = tuple(part for at_s, part in self._due if at_s <= now_s)
        self._due = [(at_s, part) for at_s, part in self._due if at_s > now_s]
        return ready
