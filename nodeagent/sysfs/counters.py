"""Several counters as one that only falls when one of them begins anew. Pure but for its own state."""

from __future__ import annotations

from collections.abc import Mapping


class Sum:
    """The sum of counters that may come and go.

    A counter that appears later than the others counts from its first reading: what it has counted before
    is no growth.
    """

    def __init__(self) -> None:
        self._bases: dict[str, int] | None = None  # None: before the first reading
        self._last: dict[str, int] = {}

    def take(self, readings: Mapping[str, int | None]) -> int | None:
        """Return the sum; None if a counter that should be there could not be read.

        Args:
            readings: Every counter there is now. One that is not among them any more is forgotten.
        """
        known = {name: value for name, value in readings.items() if value is not None}
        if not known or any(value is None and name in self._last for name, value in readings.items()):
            return None
        bases = self._bases
        self._bases = {name: self._base(bases, name, value) for name, value in known.items()}
        self._last = known
        return sum(value - self._bases[name] for name, value in known.items())

    @staticmethod
    def _base(bases: Mapping[str, int] | None, name: str, value: int) -> int:
        if bases is None:
            return 0
        return min(bases.get(name, value), value)
