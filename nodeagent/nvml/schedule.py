"""Which checks are due at a sweep. Pure but for its own state."""

from __future__ import annotations

from collections.abc import Mapping

EARLY_S = 1.0  # sweeps do not come to the second: one that is a little early counts


class Schedule:
    """Holds when each check is due next."""

    def __init__(self, periods_s: Mapping[str, float]) -> None:
        """Take the period of every check that is to be made."""
        self._periods_s = dict(periods_s)
        self._next_s: dict[str, float] = {}

    def due(self, now_s: float) -> frozenset[str]:
        """Return the checks to be made now; all of them at first. They are due again a period later."""
        found = frozenset(
            check for check in self._periods_s if now_s + EARLY_S >= self._next_s.get(check, now_s)
        )
        for check in found:
            # From when it was due, so that it does not drift; from now if sweeps were missed.
            planned_s = self._next_s.get(check, now_s)
            late = now_s - planned_s > self._periods_s[check]
            self._next_s[check] = (now_s if late else planned_s) + self._periods_s[check]
        return found
