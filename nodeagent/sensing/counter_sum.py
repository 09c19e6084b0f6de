"""The sum of counters that may appear, vanish and restart, for a check that reports several as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT = 1 << 80  # more than any number of 64-bit counters of one sum
MAX_COUNTERS = 512  # per sum: 64 links with a few counters each


@dataclass(slots=True)
class CounterSum:
    """Grows by the growth of its counters, and never falls.

    The first reading is the sum of the counters that exist at that time. A counter that appears later counts
    from its own first reading, because its earlier count is not growth. A counter that falls has restarted
    and counts from its new reading, because the errors that links log while they come up are not a fault.
    """

    total: int | None = None  # None: before the first reading
    last: dict[str, int] = field(default_factory=dict)  # the last reading of each counter
    summed: frozenset[str] = field(default=frozenset(), compare=False)  # the counters in the last sum

    def add(self, readings: Mapping[str, int | None]) -> int | None:
        """Return the sum; None if a counter that was in the last sum exists but could not be read.

        Args:
            readings: All counters that exist now. A counter that is missing here no longer exists.
        """
        known = {name: value for name, value in readings.items() if value is not None}
        missed = len(known) < len(readings) and any(name in self.summed for name in readings.keys() - known)
        if not known or missed:
            return None
        if known != self.last:
            grown = (max(0, value - self.last.get(name, value)) for name, value in known.items())
            self.total = sum(known.values()) if self.total is None else self.total + sum(grown)
            self.last.update(known)
        if known.keys() != self.summed:
            self.summed = frozenset(known)
        return self.total

    def rebase(self) -> None:
        """Count each counter from its next reading, because all have restarted, for example at a boot."""
        self.last.clear()

    def dump(self) -> dict[str, Any]:
        """Return the sum as JSON, for `load`, so that the next process can continue from it."""
        return {"total": self.total, "last": dict(self.last)}

    @classmethod
    def load(cls, raw: object) -> CounterSum:
        """Restore a dumped sum. A malformed one is treated as missing."""
        if (
            not isinstance(raw, dict)
            or not _is_count(raw.get("total"))
            or not isinstance(raw.get("last"), dict)
        ):
            return cls()
        last = list(raw["last"].items())[-MAX_COUNTERS:]
        return cls(raw["total"], {str(name): value for name, value in last if _is_count(value)})


def _is_count(raw: object) -> bool:
    return type(raw) is int and 0 <= raw < LIMIT
