"""Which checks of a sensor are due: each has its own period, the sensor's is the step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Periods:
    """Says at every step what is to be read now."""

    def __init__(self, periods_s: Mapping[str, float], known: Iterable[str], step_s: float) -> None:
        """Take the periods of the `known` checks; one without a period, or with 0, is never due."""
        self._periods_s = {each: periods_s[each] for each in known if periods_s.get(each, 0.0) > 0}
        self._slack_s = step_s / 2  # a step that comes a little early must not cost a whole one
        self._last_s: dict[str, float] = {}

    @property
    def checks(self) -> frozenset[str]:
        """Return the checks that are ever due."""
        return frozenset(self._periods_s)

    def due(self, now_s: float) -> frozenset[str]:
        """Return what is due at `now_s`, all at first, and take it as read."""
        found = frozenset(each for each in self._periods_s if self._is_due(each, now_s))
        self._last_s.update(dict.fromkeys(found, now_s))
        return found

    def _is_due(self, check: str, now_s: float) -> bool:
        last_s = self._last_s.get(check)
        return last_s is None or now_s - last_s >= self._periods_s[check] - self._slack_s
