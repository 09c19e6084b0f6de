"""Record how many ranks the group had in which steps, and how the script continues with another number.

If a lost member has no replacement, the group may continue with fewer members (`holdfast run --min-members`).
The order of the samples, and anything else that depends on the number of ranks, then depends on these sizes.
They are saved with the state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import BadInput

SIZES_KEY = "holdfast.world_sizes"  # the key in a snapshot's document; absent until the size has changed
OnResize = Callable[[int, int], object]  # takes the old and the new number of ranks


@dataclass(frozen=True, slots=True)
class SizedSteps:
    """From step `first` on, until the next entry, the group has `world_size` ranks."""

    first: int
    world_size: int


class WorldSizes:
    """The numbers of ranks of a run, up to this rank's generation."""

    def __init__(self, world_size: int, saved_by: int = 0) -> None:
        """Begin with what the supervisor knows: `saved_by` ranks saved the state (0: as many as now)."""
        self._now, self._before = world_size, saved_by or world_size
        self.steps: tuple[SizedSteps, ...] = (SizedSteps(0, self._before),)
        self.hook: OnResize | None = None
        self.is_known_to_batches = False  # the script takes its samples from `holdfast.Batches`

    @property
    def resized(self) -> tuple[int, int] | None:
        """The old and the new number of ranks, if this generation begins with a change; otherwise None."""
        return (self._before, self._now) if self._before != self._now else None

    def document(self) -> Mapping[str, Any]:
        """Return the document's entry `SIZES_KEY`; empty if the number of ranks has never changed."""
        if len(self.steps) == 1:
            return {}
        return {SIZES_KEY: [[each.first, each.world_size] for each in self.steps]}

    def restore(self, document: Mapping[str, Any], step: int) -> None:
        """Take the sizes from the document of the snapshot of `step`. Raises BadInput if they are invalid.

        The ranks that saved the document knew their number. A supervisor may not know it, if its predecessor
        could not record a change. The document therefore takes precedence.
        """
        found = document.get(SIZES_KEY)
        if found is not None:
            self.steps = tuple(_read(found))
            self._before = self.steps[-1].world_size
        if self.steps[-1].world_size != self._now:
            earlier = tuple(each for each in self.steps if each.first < step)
            if not earlier or earlier[-1].world_size != self._now:
                earlier = (*earlier, SizedSteps(step if earlier else 0, self._now))
            self.steps = earlier

    def fixed_by(self, private: Mapping[str, Any]) -> str:
        """Return why the script cannot continue with another number of ranks; "" if it can.

        `private` contains the protected objects whose states are private to a rank.
        """
        if self.hook is not None:
            return ""
        if not self.is_known_to_batches:
            return (
                "the script neither calls session.on_resize(...) nor takes its samples from holdfast.Batches"
            )
        if private:
            names = ", ".join(sorted(private))
            return f"each rank has its own {names}, and the script does not call session.on_resize(...)"
        return ""

    def adapt(self, private: Mapping[str, Any]) -> bool:
        """Call the script's hook if the number of ranks has changed. Return whether it was called.

        Raises:
            BadInput: the number has changed, and the script cannot continue with another number.
        """
        resized = self.resized
        if resized is None:
            return False
        why = self.fixed_by(private)
        if why:
            old, new = resized
            ranks = "1 rank" if new == 1 else f"{new} ranks"
            raise BadInput(f"cannot resume on {ranks} from a state saved by {old}: {why}")
        if self.hook is not None:
            self.hook(*resized)
        self._before = self._now  # a later loop does not begin with a change
        return self.hook is not None


def _read(found: Any) -> list[SizedSteps]:
    try:
        sizes = [SizedSteps(operator.index(first), operator.index(ranks)) for first, ranks in found]
    except (TypeError, ValueError):
        sizes = []
    firsts = [each.first for each in sizes]
    if not sizes or firsts[0] != 0 or firsts != sorted(set(firsts)) or any(e.world_size < 1 for e in sizes):
        raise BadInput(f"{SIZES_KEY} of the snapshot is not a list of steps and numbers of ranks")
    return sizes


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps of one world size: the first one, its epoch, and how many samples of the epoch precede it."""

    first: int
    epoch: int
    offset: int
    whole: int  # the samples of all ranks in a step


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The position of a step: its epoch, and how many samples of the epoch precede it."""

    epoch: int
    offset: int


class EpochPlan:
    """Divides the steps of a run into epochs, even if the number of ranks changes within an epoch.

    The samples of an epoch keep their order, and each step takes the next ones. A step always takes a whole
    batch for each rank. So after the number of ranks has changed, the last step of the epoch may not have
    enough samples. It then takes some from the beginning of the epoch.
    """

    def __init__(
        self, samples: int, batch_size: int, sizes: tuple[SizedSteps, ...], *, drop_last: bool
    ) -> None:
        self._samples, self._drops = samples, drop_last
        self._stretches: list[_Stretch] = []
        epoch = offset = 0
        for number, each in enumerate(sizes):
            stretch = _Stretch(each.first, epoch, offset, batch_size * each.world_size)
            self._stretches.append(stretch)
            if number + 1 < len(sizes):
                place = self._place(stretch, sizes[number + 1].first)
                epoch, offset = place.epoch, place.offset

    def place(self, step: int) -> SamplePlace:
        """Return the position of `step`."""
        return self._place(self._stretch(step), step)

    def position(self, step: int) -> int:
        """Return the number of samples that all ranks see before `step`."""
        total = 0
        for number, each in enumerate(self._stretches):
            last = self._stretches[number + 1].first if number + 1 < len(self._stretches) else step
            total += max(0, min(step, last) - each.first) * each.whole
        return total

    def first_step(self, epoch: int) -> int:
        """Return the step at which `epoch` begins."""
        step = 0
        for number, each in enumerate(self._stretches):
            if epoch > each.epoch:
                after = epoch - each.epoch - 1
                step = each.first + self._left(each, each.offset) + after * self.per_epoch(each.whole)
            elif epoch == each.epoch and not each.offset:
                step = each.first
            else:
                return step
            if number + 1 < len(self._stretches) and step < self._stretches[number + 1].first:
                return step
        return step

    def per_epoch(self, whole: int) -> int:
        """Return the number of steps of `whole` samples in a whole epoch."""
        return self._samples // whole if self._drops else math.ceil(self._samples / whole)

    def _stretch(self, step: int) -> _Stretch:
        return next((each for each in reversed(self._stretches) if each.first <= step), self._stretches[0])

    def _place(self, stretch: _Stretch, step: int) -> SamplePlace:
        after, left = step - stretch.first, self._left(stretch, stretch.offset)
        if after < left:
            return SamplePlace(stretch.epoch, stretch.offset + after * stretch.whole)
        epochs, within = divmod(after - left, max(1, self.per_epoch(stretch.whole)))
        return SamplePlace(stretch.epoch + 1 + epochs, within * stretch.whole)

    def _left(self, stretch: _Stretch, offset: int) -> int:
        """Return the number of steps from `offset` to the end of the epoch.

        It is at least 1, because the step before a change was not the last one of its epoch.
        """
        left = self._samples - offset
        return max(1, left // stretch.whole if self._drops else math.ceil(left / stretch.whole))
