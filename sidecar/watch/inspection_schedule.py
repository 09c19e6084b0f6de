"""Schedule the launcher's inspections of its ranks while any rank of the group is late. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.25  # the time between the first two inspections; each later gap is 1.5 times as long
LAST_S = 5.0  # the longest gap
ANSWER_S = 10.0  # an inspection that has no result after this time is treated as lost
# While gaps are shorter than this, an inspection that the supervisor requests is due immediately.
DENSE_S = 1.0


@dataclass(slots=True)
class InspectionSchedule:
    """Numbers and schedules inspections: frequently at first, to detect a hang quickly, then more rarely."""

    _requested: int = 0  # the number of the newest inspection
    _requested_s: float = 0.0
    _answered_s: float = 0.0  # when the result of that inspection arrived; 0 until then
    _gap_s: float = FIRST_S
    _inspection_id: int = 0  # the supervisor's, in the request for that inspection

    def advance(self, wanted: bool, answered: int, now_s: float, inspection_id: int = 0) -> int:
        """Return the number of the next inspection if it is due now, and record it as requested; otherwise 0.

        `answered` is the number of the newest inspection with a result, which a previous sidecar may have
        requested. `inspection_id` is that of the supervisor's order (see `supervisor.hangs.deadlock`). While
        gaps are shorter than `DENSE_S`, a new id makes another inspection due immediately.
        """
        if not wanted:
            self._requested, self._requested_s, self._answered_s, self._gap_s = 0, 0.0, 0.0, FIRST_S
            return 0
        if self._requested and answered >= self._requested and not self._answered_s:
            self._answered_s = now_s
        needed = inspection_id != self._inspection_id and self._gap_s < DENSE_S
        waits_s = ANSWER_S if not self._answered_s else 0.0 if needed else self._gap_s
        if self._requested and now_s < (self._answered_s or self._requested_s) + waits_s:
            return 0
        if self._requested:
            self._gap_s = min(LAST_S, self._gap_s * 1.5)
        self._requested, self._requested_s = max(self._requested, answered) + 1, now_s
        self._answered_s, self._inspection_id = 0.0, inspection_id
        return self._requested
