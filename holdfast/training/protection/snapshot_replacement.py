"""Decide when to replace a snapshot that was discarded because its step is void.

If a script changes private state after a commit, no copy contains the changed state, so the step is void.

- If this rank made the step void, it copies the next step that it does not make void. The copy waits until
  the script's work after that commit has ended, so no copy is wasted, no matter how many steps are void.
- If another rank made the step void, this member receives an order to discard the snapshot. This rank notices
  the loss at the next commit, and copies the step of that commit. That step may be void too, but this becomes
  known only when its snapshot is discarded as well. Each consecutive loss roughly doubles the number of steps
  until the next copy, up to one interval. The numbers are irregular, to keep the copies from always hitting
  the same phase of a pattern in the script.
- With three or more members, no member has the private states of all ranks. If only one member has a snapshot
  of a step, the private states of that step are kept for only a few steps. So all members copy a common step,
  the next multiple of half the interval, whose private states are kept for a long time. The rank that made a
  step void also copies the next step, in case all ranks have made the same step void. This extra snapshot may
  be overwritten at any time, and does not replace another snapshot.
"""

from __future__ import annotations

from collections.abc import Collection

_GOLDEN = 0.618  # the fractional parts of the multiples of this number are spread evenly
FIRST_AFTER_STEPS = 4  # a generation takes its first snapshot this many steps after its start


class SnapshotReplacement:
    """Plans one member's replacement snapshots in one generation. The member's first rank uses it."""

    def __init__(self, has_all_private: bool) -> None:
        """Start without a planned replacement.

        `has_all_private` means that this member has the private states of all ranks, because it keeps the
        states of all other members' ranks in addition to its own.
        """
        self._has_all_private = has_all_private
        self._replace_from = -1  # the first step that may replace a void step; -1 if no replacement is needed
        self._common_step = -1  # the common step that all members copy; -1 if there is none
        self._existing: frozenset[int] = frozenset()  # the steps of the existing snapshots
        self._made = -1  # the last step that replaced a void step
        self._losses = 0  # the number of consecutive snapshots that were discarded because of other ranks
        self._doubts = False  # whether the last check could not tell if a missing snapshot was discarded

    def voided(self, step: int, every: int) -> None:
        """Plan a replacement, because this rank has made `step` void and a snapshot of it was wanted.

        `every` is the interval in steps, or 0 if there is none.
        """
        self._replace_from = step + 1
        self._plan_common_step(step, every)

    def forgot(self, existing: Collection[int]) -> None:
        """Record that this rank itself discarded a snapshot. The snapshots of the steps `existing` remain."""
        self._existing, self._doubts = frozenset(existing), False

    def observe(self, step: int, existing: Collection[int], every: int) -> None:
        """At the commit of `step`, detect whether a snapshot was discarded because of another rank.

        The discarded snapshot may not be the newest one, because the last remaining snapshot is never
        discarded, even if it is void. If the older snapshot is missing, it is considered discarded only if it
        is still missing at the next commit. Until then another rank of this member may be overwriting it, for
        example before a pause that this rank has not reached yet.
        """
        before, now = self._existing, frozenset(existing)
        if now == before:
            self._doubts = False
            return
        lost, new = before - now, now - before  # a new snapshot has overwritten the missing one
        # If a rank is overwriting the older snapshot, it finishes before the next commit, because all ranks
        # synchronise before that commit.
        self._doubts = bool(lost and not new and now) and min(lost) < max(now) and not self._doubts
        if self._doubts:
            return
        self._existing = now
        if new or not lost:
            return
        self._plan_common_step(step - 1, every)
        if self._has_all_private and self._replace_from < 0:
            self._replace_from = step + _steps_to_wait(self._losses, max(every, FIRST_AFTER_STEPS))
            self._losses += 1

    def is_due(self, step: int) -> bool:
        """Return True if `step` must be copied as a replacement, unless it turns out to be void."""
        return 0 <= self._replace_from <= step

    def is_common(self, step: int) -> bool:
        """Return True if all members copy `step`, as they copy the steps of the interval."""
        return step == self._common_step

    @property
    def is_extra(self) -> bool:
        """True if other members may lack a copy of the step that is due."""
        return not self._has_all_private

    def interval_due(self) -> None:
        """At a step of the interval, reset the count of losses, unless the last replacement was lost."""
        if self._replace_from < 0 and max(self._existing, default=-1) >= self._made:
            self._losses = 0

    def made(self, step: int, existing: Collection[int]) -> None:
        """Record that a snapshot of `step` was made; `existing` are the steps of all existing snapshots."""
        if self.is_due(step):
            self._made, self._replace_from = step, -1
        self._existing, self._doubts = frozenset(existing), False

    def _plan_common_step(self, step: int, every: int) -> None:
        if not self._has_all_private:
            unit = 1 << max(every // 2, 1).bit_length() - 1 if every else FIRST_AFTER_STEPS
            self._common_step = (step // unit + 1) * unit


def _steps_to_wait(losses: int, most: int) -> int:
    """Return the number of steps to wait after `losses` consecutive losses. It is at most `most`."""
    bound = min((1 << min(losses, most.bit_length())) - 1, most)
    return int(bound * (0.5 + 0.5 * (losses * _GOLDEN % 1.0)))
