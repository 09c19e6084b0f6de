"""When to look again at ranks that are late? Pure: the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.25  # from one look to the next; each gap is half as long again
LAST_S = 5.0
ANSWER_S = 10.0  # a look that is not answered by then was lost
DENSE_S = 1.0  # while gaps are shorter, one that the supervisor needs for a proof is not waited for


@dataclass(slots=True)
class Closely:
    """Numbers the looks, and spaces them: dense at first, to tell a hang from work, then seldom."""

    _asked: int = 0
    _asked_s: float = 0.0
    _answered_s: float = 0.0
    _gap_s: float = FIRST_S
    _moment: int = 0  # what the newest was asked with

    def due(self, wanted: bool, looked: int, now_s: float, moment: int = 0) -> int:
        """Return the number of the look that is to be taken now, 0 for none.

        `looked` is the number of the newest look that was answered, perhaps to another sidecar. `moment` is
        what the supervisor asks with: a new one makes another look due at once while looks are dense.
        """
        if not wanted:
            self._asked, self._asked_s, self._answered_s, self._gap_s = 0, 0.0, 0.0, FIRST_S
            return 0
        if self._asked and looked >= self._asked and not self._answered_s:
            self._answered_s = now_s
        needed = moment != self._moment and self._gap_s < DENSE_S
        waits_s = ANSWER_S if not self._answered_s else 0.0 if needed else self._gap_s
        if self._asked and now_s < (self._answered_s or self._asked_s) + waits_s:
            return 0
        if self._asked:
            self._gap_s = min(LAST_S, self._gap_s * 1.5)
        self._asked, self._asked_s, self._answered_s = max(self._asked, looked) + 1, now_s, 0.0
        self._moment = moment
        return self._asked
