"""Decides when a launcher inspects its ranks, while one of them or a rank of another member is late. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.25  # between the first two inspections; each later gap is 1.5 times as long
LAST_S = 5.0  # the longest gap
ANSWER_S = 10.0  # an inspection without a result after this time counts as lost
# While gaps are shorter than this, an inspection that the supervisor requests as proof is due at once.
DENSE_S = 1.0


@dataclass(slots=True)
class InspectionSchedule:
    """Numbers and spaces the inspections: frequent at first, to detect a hang quickly, and rare later."""

    _requested: int = 0  # number of the newest inspection
    _requested_s: float = 0.0
    _answered_s: float = 0.0  # when its result arrived; 0 until then
    _gap_s: float = FIRST_S
    _moment: int = 0  # the supervisor's `moment` for which it was requested

    def advance(self, wanted: bool, answered: int, now_s: float, moment: int = 0) -> int:
        """Request the next inspection if one is due; return its number, or 0.

        `answered` is the number of the newest inspection with a result; a previous sidecar may have requested
        it. `moment` is the number in the supervisor's order (`supervisor.hangs.deadlock`). While inspections
        are dense, a new number makes another inspection due at once.
        """
        if not wanted:
            self._requested, self._requested_s, self._answered_s, self._gap_s = 0, 0.0, 0.0, FIRST_S
            return 0
        if self._requested and answered >= self._requested and not self._answered_s:
            self._answered_s = now_s
        needed = moment != self._moment and self._gap_s < DENSE_S
        waits_s = ANSWER_S if not self._answered_s else 0.0 if needed else self._gap_s
        if self._requested and now_s < (self._answered_s or self._requested_s) + waits_s:
            return 0
        if self._requested:
            self._gap_s = min(LAST_S, self._gap_s * 1.5)
        self._requested, self._requested_s = max(self._requested, answered) + 1, now_s
        self._answered_s, self._moment = 0.0, moment
        return self._requested
