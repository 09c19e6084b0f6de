"""When a snapshot is made again because the one that was due is not kept.

A script may change private state after a commit. Then no copy has the state of that step, which is void.

- The rank that made a step void copies the next step that it does not make void, once its work after that
  commit is over. So no copy is made in vain, however many steps are void.
- Of a step that another rank made void the snapshot is forgotten, by order. That is seen at the next commit,
  and the step of that commit is copied. It may be void as well, which shows only when it is forgotten, too:
  each such loss in a row about doubles the time until the next copy, up to an interval. The times are uneven,
  so that they do not meet the same place of a pattern in the script again and again.
- From three members on, none has the private states of all ranks, and those of a step that only one member
  has a snapshot of are kept for a few steps. There the members meet at a multiple of half the interval, whose
  private states are kept for long. The rank that made a step void copies the next one as well, for all ranks
  may have done so. Such an extra snapshot may be overwritten, but takes the place of no other.
"""

from __future__ import annotations

from collections.abc import Collection

_GOLDEN = 0.618  # multiples of it are spread evenly between whole numbers
FIRST_AFTER_STEPS = 4  # steps after the start of a generation in which it takes its first own snapshot


class SnapshotReplacement:
    """One member's, in its first rank, for one generation."""

    def __init__(self, near: bool) -> None:
        """`near`: this member has the private states of all ranks, its own and those it keeps for others."""
        self._near = near
        self._from = -1  # the first step that may take the place of one that is void; -1: none is needed
        self._meeting = -1
        self._there: frozenset[int] = frozenset()  # steps of the snapshots that there are
        self._made = -1  # the last step that took the place of one
        self._losses = 0  # in a row, for other ranks
        self._doubts = False  # whether the loss that the last look saw is one

    def voided(self, step: int, every: int) -> None:
        """This rank made `step` void, of which a snapshot was wanted. `every` is the interval, 0 for none."""
        self._from = step + 1
        self._meet(step, every)

    def forgot(self, there: Collection[int]) -> None:
        """This rank has forgotten a snapshot itself; those of the steps `there` are left."""
        self._there, self._doubts = frozenset(there), False

    def look(self, step: int, there: Collection[int], every: int) -> None:
        """Find out, at the commit of `step`, whether a snapshot was forgotten for another rank.

        Not only the newest: the last one that there is stays, void or not. Another rank of this member may be
        overwriting the older one, as before a pause that it has come to first.
        """
        before, now = self._there, frozenset(there)
        lost, new = before - now, now - before  # one that is new has taken another's place
        # What overwrites the older one has ended by the next commit, for which the ranks have met.
        self._doubts = bool(lost and not new and now) and min(lost) < max(now) and not self._doubts
        if self._doubts:
            return
        self._there = now
        if new or not lost:
            return
        self._meet(step - 1, every)
        if self._near and self._from < 0:
            self._from = step + _steps_to_wait(self._losses, max(every, FIRST_AFTER_STEPS))
            self._losses += 1

    def is_due(self, step: int) -> bool:
        """True when `step` is to be copied if it is not made void."""
        return 0 <= self._from <= step

    def meets(self, step: int) -> bool:
        """True when `step` is to be copied as one of the interval is."""
        return step == self._meeting

    @property
    def is_extra(self) -> bool:
        """True when a copy that is due may be one that no other member has."""
        return not self._near

    def regular(self) -> None:
        """A snapshot is due by the interval: forget the losses before if the last copy was none."""
        if self._from < 0 and max(self._there, default=-1) >= self._made:
            self._losses = 0

    def made(self, step: int, there: Collection[int]) -> None:
        """A snapshot of `step` was made; those of the steps `there` are all that there are."""
        if self.is_due(step):
            self._made, self._from = step, -1
        self._there, self._doubts = frozenset(there), False

    def _meet(self, step: int, every: int) -> None:
        if not self._near:
            unit = 1 << max(every // 2, 1).bit_length() - 1 if every else FIRST_AFTER_STEPS
            self._meeting = (step // unit + 1) * unit


def _steps_to_wait(losses: int, most: int) -> int:
    """Return for how many steps to wait after so many losses in a row, the present one apart."""
    bound = min((1 << min(losses, most.bit_length())) - 1, most)
    return int(bound * (0.5 + 0.5 * (losses * _GOLDEN % 1.0)))
