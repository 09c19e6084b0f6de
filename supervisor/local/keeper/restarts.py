"""Decide when the keeper restarts a part that died. Pure: the clock is an argument.

A part that died is restarted immediately, unless it died soon after its start or keeps failing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

YOUNG_S = 1.0  # the minimum time between two starts of a part, to prevent it from failing in a tight loop
WELL_S = 10.0  # a part that lived this long did not fail at its start
LONGEST_S = 30.0  # the maximum time between two starts of a part that always fails
ROW_S = 4 * LONGEST_S  # failures further apart are treated as unrelated
LOOP = 3  # this many failures in a row are not a coincidence and are reported

PartKind: TypeAlias = Literal["supervisor", "sidecar", "member"]


@dataclass(frozen=True, slots=True)
class RestartKey:
    """What the keeper restarts: the supervisor, the sidecar of `member`, or a new member."""

    kind: PartKind
    member: str = ""

    @property
    def name(self) -> str:
        """The name that users see. The log files of the supervisor and the sidecars have the same name."""
        if self.kind == "member":
            return "another member"
        return f"{self.kind} {self.member}".strip()


@dataclass(slots=True)
class Restarts:
    """The parts that wait for their next start. All times are in seconds on one monotonic clock."""

    _due: list[tuple[float, RestartKey]] = field(default_factory=list)
    # each part's number of failures in a row, and the time of the last one
    _failures: dict[RestartKey, tuple[int, float]] = field(default_factory=dict)

    def died(self, part: RestartKey, born_s: float, now_s: float, failed: bool = False) -> float:
        """Schedule the next start of `part`, and return the seconds until then.

        The next start is at least `YOUNG_S` after the last one. After the second failure in a row, a pause is
        added, which doubles with each further failure up to `LONGEST_S`. A part has failed if it ended
        within `WELL_S` of its start and `failed` is true, which means that it was not killed from outside.
        """
        before, last_s = self._failures.get(part, (0, now_s))
        in_a_row = before if now_s - last_s < ROW_S else 0
        failures = in_a_row + 1 if failed and now_s - born_s < WELL_S else 0
        self._failures[part] = failures, now_s
        pause_s = min(LONGEST_S, YOUNG_S * 2 ** min(failures - 1, 10)) if failures > 1 else 0.0
        at_s = max(now_s + pause_s, born_s + YOUNG_S)
        self._due = [(due_s, other) for due_s, other in self._due if other != part] + [(at_s, part)]
        return at_s - now_s

    def waits(self, part: RestartKey) -> bool:
        """True if a start of `part` is scheduled."""
        return any(other == part for _, other in self._due)

    def failures(self, part: RestartKey) -> int:
        """Return how often in a row `part` has failed within `WELL_S` of its start."""
        return self._failures.get(part, (0, 0.0))[0]

    def pop_due(self, now_s: float) -> tuple[RestartKey, ...]:
        """Remove and return the parts whose start is due."""
        ready = tuple(part for at_s, part in self._due if at_s <= now_s)
        self._due = [(at_s, part) for at_s, part in self._due if at_s > now_s]
        return ready
