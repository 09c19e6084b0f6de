"""What the pauses of a script do: whether the state has to be copied before one begins.

A pause in which averaged weights are swapped in leaves nothing to copy when a peer dies in it. One that
only reads the weights needs no copy. Which kind it is shows in the first pause of a label, and there a copy
is made.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import members_of_group

MAX_FIRST_COPY_S = 2.0  # the longest copy that is made for a label of which nothing is known
MIN_PAUSE_PER_COPY = 10.0  # times the copy that a pause has to last for a copy to be worth it
_MARK = "_holdfast_left_pause"  # of an exception
_DEEP = 50  # exceptions within each other: more are not looked at


@dataclass(slots=True)
class _LabelHistory:
    writes: bool = False
    longest_s: float = 0.0


class PauseHistory:
    """Of one generation, by label."""

    def __init__(self) -> None:
        self._seen: dict[str, _LabelHistory] = {}
        self._now = _LabelHistory()
        self._label = ""
        self._began_s = 0.0

    def wants_copy(self, label: str, copy_s: float) -> bool:
        """Say whether the state shall be copied before a pause of this label, which takes `copy_s`."""
        seen = self._seen.get(label)
        if seen is None:
            return copy_s <= MAX_FIRST_COPY_S
        return seen.writes and seen.longest_s >= MIN_PAUSE_PER_COPY * copy_s

    @property
    def known(self) -> bool:
        """Say whether the present pause has been found to write the state."""
        return self._now.writes

    def began(self, label: str, now_s: float) -> None:
        """A pause begins."""
        self._label, self._began_s, self._now = label, now_s, _LabelHistory()

    def writes(self) -> None:
        """The present pause has written the state."""
        self._now.writes = True

    def ended(self, now_s: float) -> None:
        """The present pause is over. One that wrote once is taken for one that may again."""
        before = self._seen.get(self._label, _LabelHistory())
        longest_s = max(before.longest_s, now_s - self._began_s)
        self._seen[self._label] = _LabelHistory(before.writes or self._now.writes, longest_s)


def mark_left_pause(error: BaseException, step: int) -> None:
    """Note that `error` leaves a pause after `step` steps, so that the work in the pause is not done.

    What the rank is at from then on does not show it. What the script handles takes the note with it.
    """
    with suppress(Exception):  # a type may forbid it
        vars(error)[_MARK] = step


def step_of_left_pause(error: BaseException) -> int:
    """Return the steps done when `error`, or what it comes from, last left a pause; -1 if it left none."""
    found, seen = -1, [error]
    for each in seen:
        found = max(found, vars(each).get(_MARK, -1))
        for other in (each.__cause__, each.__context__, *members_of_group(each)):
            if other is not None and len(seen) < _DEEP and not any(other is known for known in seen):
                seen.append(other)
    return found
