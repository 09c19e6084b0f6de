"""Copy the replicated state into the arena: at the interval, and just in time when a peer has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.snapshot import tensor_copy
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.commit_records import SLOTS
from holdfast.state import capture
from holdfast.state.cached_capture import CachedCollector
from holdfast.state.capture import JSON_ENTRY
from holdfast.state.device import Broken, Device, HostDevice, PinnedMemory
from holdfast.training.protection.device_copy import AsyncCopy, HostPart, TensorSplit
from holdfast.training.protection.frozen_tensors import FrozenTensors, SkippedTensors

if TYPE_CHECKING:
    import torch

    from holdfast.fileio.safetensors import Layout
    from holdfast.snapshot.arena import SlotWriter


MIN_SAMPLES = 8  # steps before the automatic interval is trusted
MAX_INTERVAL = 1 << 14
MIN_INTERVAL_S = 1.0
PATIENCE_S = 0.3  # for a slot that somebody reads: a recovery waits for this copy
PAUSE_S = 0.002
COPY_LIMIT_S = 10.0  # for a piece of a copy from a device, which waits for nothing: longer, and it never ends

COPY_S, COPY_BYTES_PER_S = 20.0, 50e6  # what a snapshot may take, at memory that is swapped or starved

Tensors = list[tuple[str, "torch.Tensor"]]


class WrittenDuringCopy(Exception):
    """What was copied has been written meanwhile."""


@dataclass(slots=True)
class _Targets:
    """Where the tensors go in one slot, as long as its mapping and the layout are these."""

    data: memoryview
    layout: Layout
    views: list[torch.Tensor]
    copying: tensor_copy.ParallelCopy | None  # None: from a device
    # compared; copied
    part: tuple[SkippedTensors, tensor_copy.ParallelCopy, tensor_copy.ParallelCopy] | None = None


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A copy from the device that goes on. Its slot is held until it is finished."""

    generation: int
    step: int
    offload: AsyncCopy
    draft: SlotWriter


class SnapshotWriter:
    """The rank's hand on its member's arena."""

    def __init__(
        self,
        directory: Path,
        objects: Mapping[str, Any],
        world_size: int,
        base: tuple[int, int] | None = None,
        moved: Callable[[], None] | None = None,
        device: Device | None = None,
        void: Callable[[], frozenset[int]] = frozenset,
        other: tuple[int, int] | None = None,
        more: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`base` is the (generation, step) resumed from: kept until this generation has its own.

        `other` is that of the snapshot beside it that the group could go back to as well, if there is one.

        `moved` is called for each piece that is copied, by any thread. `void` gives the steps of this
        generation whose state some rank of the member has changed after their commit. `more` gives what the
        document has beside the objects.
        """
        self.arena = Arena(directory)
        self._moved = moved or _no_progress
        self._void = void
        self._base = base
        self._other = other
        self._standing = CachedCollector(objects, more)
        self.frozen = FrozenTensors(objects)
        self.was_whole = True  # the last copy left nothing out
        self.was_read = 1.0  # of the state's bytes, by the last copy: copied or compared
        self._world_size = world_size
        self._device: Device = device or HostDevice()
        self._targets: dict[int, _Targets] = {}
        self._json_bytes = 0
        self._layout: tuple[Tensors, int, Layout] | None = None
        self._division: TensorSplit | None = None
        self._pinned: dict[int, tuple[memoryview, PinnedMemory | None]] = {}
        self._peers_failed = False
        self.extra: tuple[int, int] | None = None  # one that is overwritten before any other

    def held(self, generation: int, step: int) -> bool:
        """True when another rank of the member has written this very state already."""
        return any((r.generation, r.step) == (generation, step) for r in self.arena.records())

    def write(
        self,
        generation: int,
        step: int,
        keep: frozenset[tuple[int, int]] | None = None,
        part: HostPart | None = None,
        still: Callable[[], bool] = lambda: True,
    ) -> float | None:
        """Copy the present state into the free slot as that of `step`, or into one not in `keep`.

        On a device the host's part may be another step's already: then `part` is what was kept of this one.
        `still` is asked when everything is copied, and `WrittenDuringCopy` is raised if it says no.

        Returns the seconds it took, None when no slot was free (a checkpoint is being written from
        it). Raises `OSError` when the memory volume is full; the slots keep what they have. Raises `Broken`.
        """
        began = time.perf_counter()
        if self._device.queues:
            transfer = self.begin(generation, step, keep, part)
            return None if transfer is None else self.finish(transfer, still)
        tensors, document = self._standing.collect()
        draft = self._draft(tensors, document, generation, step, keep)
        if draft is None:
            return None
        with draft:
            whole = self._copy(tensors, draft)
            if not still():
                raise WrittenDuringCopy(f"step {step}")
            self.frozen.wrote(tensors, draft.commit(), draft.layout.header)
        cost_s = time.perf_counter() - began
        self.was_whole = whole
        if whole:
            self.arena.note_cost(draft.layout.total_bytes, cost_s)
        return cost_s

    def _copy(self, tensors: Tensors, draft: SlotWriter) -> bool:
        """Copy the host's tensors, but for those that the slot has already. True if there were none."""
        targets = self._targets_of(tensors, draft)
        assert targets.copying is not None
        left_out = self.frozen.left_out(tensors, draft.before, draft.layout.header)
        total = sum(tensor.nbytes for _, tensor in tensors) or 1
        spared = sum(tensors[n][1].nbytes for n in left_out.places) - left_out.bytes
        self.was_read = 1.0 - spared / total
        if not left_out.places:
            targets.copying.run(self._moved)
            return True
        if targets.part is None or targets.part[0] != left_out:
            targets.part = (
                left_out,
                *_split_copies(left_out, targets.views, [tensor for _, tensor in tensors]),
            )
        _, comparing, copying = targets.part
        comparing.run(self._moved)
        copying.run(self._moved)
        if comparing.differed:
            self.frozen.distrust()
        return False

    def restored(self, path: Path, generation: int, step: int, header: bytes) -> None:
        """The objects have just been filled from the slot at `path`: what is frozen lies there already."""
        tensors, _ = self._standing.collect()
        for record in self.arena.records():
            if (record.path, record.generation, record.step) == (path, generation, step):
                self.frozen.restored(tensors, record, header)

    def begin(
        self,
        generation: int,
        step: int,
        keep: frozenset[tuple[int, int]] | None = None,
        part: HostPart | None = None,
    ) -> PendingSnapshot | None:
        """Begin to copy the device's state, which is whole; see `write`. The host's part is copied on return.

        A copy can be waited for as long as the device works, for it waits for nothing itself.
        """
        division, text = self._divided() if part is None else (part.division, part.text)
        draft = self._draft(division.of, text, generation, step, keep)
        if draft is None:
            return None
        try:
            targets = self._targets_of(division.of, draft)
            if not self._peers_failed:
                self._pin(draft)
            return PendingSnapshot(
                generation, step, AsyncCopy(self._device, division, part, targets.views), draft
            )
        except BaseException:
            draft.abandon()
            raise

    def finish(self, transfer: PendingSnapshot, still: Callable[[], bool] = lambda: True) -> float:
        """Make a snapshot of a copy, when it has ended; see `write`. Returns what it took in seconds.

        Raises `WrittenDuringCopy`; `Broken` when it does not end. Then its slot stays held: the device may
        write into it for as long as this process lives.
        """
        for mark in transfer.offload.copy.marks:
            if not self._device.wait(mark, COPY_LIMIT_S):
                raise Broken(f"a copy from the device has not moved for {COPY_LIMIT_S:.0f} s")
            self._moved()
        with transfer.draft as draft:
            if not still():
                raise WrittenDuringCopy(f"step {transfer.step}")
            cost_s = transfer.offload.finish()
            draft.commit()
        self.arena.note_cost(draft.layout.total_bytes, cost_s)
        return cost_s

    def keep(self) -> HostPart | None:
        """Return the host's part of the present state; None if it is too large to be copied in each step."""
        division, text = self._divided()
        return division.keep(text)

    def _divided(self) -> tuple[TensorSplit, str]:
        tensors, text = self._standing.collect()
        if self._division is None or self._division.of is not tensors:
            self._division = TensorSplit(tensors, self._device)
        return self._division, text

    def _draft(
        self,
        tensors: Tensors,
        document: str,
        generation: int,
        step: int,
        keep: frozenset[tuple[int, int]] | None,
    ) -> SlotWriter | None:
        """Return the free slot with everything in it but the tensors."""
        text = capture.padded(document, self._json_bytes)
        self._json_bytes = len(text)
        layout = self._layout_of(tensors, len(text))
        kept = keep or self._kept(generation)
        draft = self.arena.begin(layout, generation, step, self._world_size, kept)
        if draft is not None:
            entry = draft.layout[JSON_ENTRY]
            draft.data[entry.begin : entry.end] = text
        return draft

    def state_bytes(self) -> int:
        """Return how large a snapshot of the present state is. What it takes is saved by later copies."""
        tensors, document = self._standing.collect()
        text = capture.padded(document, self._json_bytes)
        self._json_bytes = len(text)
        return self._layout_of(tensors, len(text)).total_bytes

    def expected_bytes(self) -> int:
        """Return how large the next snapshot will be, as the last one was; without one, as `state_bytes`."""
        return self._layout[2].total_bytes if self._layout is not None else self.state_bytes()

    def _layout_of(self, tensors: Tensors, json_bytes: int) -> Layout:
        """Return the layout, planned anew only for tensors that were collected anew."""
        if self._layout is None or self._layout[0] is not tensors or self._layout[1] != json_bytes:
            self._layout = (tensors, json_bytes, capture.layout_of(tensors, json_bytes))
        return self._layout[2]

    def _kept(self, generation: int) -> frozenset[tuple[int, int]] | None:
        """Return what must stay, None for the newest.

        A good snapshot stays, and not a newer one that is void: the sidecar forgets that, but after a few
        steps. The base is protected from newer but rolled back snapshots of the generation before.
        """
        found = frozenset((record.generation, record.step) for record in self.arena.records())
        own = {age for age in found if age[0] == generation}
        if own and len(found) == SLOTS:
            late = self._void()
            void = {age for age in own if age[1] in late}
            if void and (good := {age for age in found - void if age in own or age == self._base}):
                return frozenset(good)
        if self.extra in found and len(found) > 1:
            return frozenset(found - {self.extra})
        return None if own or self._base is None else frozenset({self._base})

    def forget(self, generation: int, step: int) -> bool:
        """Make the snapshot of this step not exist: the script has changed the state after its commit.

        False when it exists on return: somebody reads it.
        """
        for record in self.arena.records():
            if (record.generation, record.step) == (generation, step):
                self.arena.forget(record)
        return not self.held(generation, step)

    def write_just_in_time(
        self,
        generation: int,
        step: int,
        part: HostPart | None = None,
        still: Callable[[], bool] = lambda: True,
    ) -> float | None:
        """Like `write`, but wait for nothing that a dead peer could keep from ending.

        Where the free slot is pinned, because a checkpoint is being written from it, that one is what stays
        and the newer one is overwritten; if it must not be, this waits for up to `PATIENCE_S`.
        """
        self._peers_failed = True
        give_up_at = time.monotonic() + PATIENCE_S
        cost_s = self.write(generation, step, None, part, still)
        while cost_s is None and not self.held(generation, step):
            if (stays := self._first_to_go(generation)) is not None:
                cost_s = self.write(generation, step, frozenset({stays}), part, still)
            if cost_s is not None or time.monotonic() > give_up_at:
                break
            time.sleep(PAUSE_S)
            cost_s = self.write(generation, step, None, part, still)
        return cost_s

    def write_over(self, generation: int, step: int) -> float | None:
        """Like `write`, but into the newer slot while somebody reads the older, which stays whole."""
        stays = self._first_to_go(generation)
        return self.write(generation, step, None if stays is None else frozenset({stays}))

    def _first_to_go(self, generation: int) -> tuple[int, int] | None:
        """Return which of two is overwritten first, if the group could go back to either; else None."""
        ages = [(record.generation, record.step) for record in self.arena.records()]
        good = (self._base, self._other)
        if len(ages) < SLOTS or any(age[0] != generation and age not in good for age in ages):
            return None
        kept = self._kept(generation) or frozenset()
        return next((age for age in reversed(ages) if age not in kept), None)

    def _targets_of(self, tensors: Tensors, draft: SlotWriter) -> _Targets:
        """Return where each tensor goes; found anew for another mapping or other tensors."""
        slot = draft.record.slot
        known = self._targets.get(slot)
        if known is None or known.data is not draft.data or known.layout is not draft.layout:
            by_name = capture.views(draft.layout, draft.data)
            views = [by_name[name] for name, _ in tensors]
            copying = (
                None
                if self._device.queues
                else tensor_copy.ParallelCopy(views, [tensor for _, tensor in tensors])
            )
            known = self._targets[slot] = _Targets(draft.data, draft.layout, views, copying)
        return known

    def _pin(self, draft: SlotWriter) -> None:
        """Page-lock the slot for the device's copy engine, once per mapping. Without that it is slower."""
        slot = draft.record.slot
        mapping, pinned = self._pinned.get(slot, (None, None))
        if mapping is draft.data:
            return
        if pinned is not None:
            pinned.release()
        self._pinned[slot] = draft.data, self._device.pin(draft.data)


def _split_copies(
    left_out: SkippedTensors, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> tuple[tensor_copy.ParallelCopy, tensor_copy.ParallelCopy]:
    """Return what compares the stretches that may differ, and what copies the rest."""
    ours, theirs = (
        [tensor_copy.byte_view(tensors[n])[at:to] for n, at, to in left_out.compared]
        for tensors in (targets, sources)
    )
    rest = [n for n in range(len(sources)) if n not in left_out.places]
    return (
        tensor_copy.ParallelCopy(ours, theirs, sparing=True),
        tensor_copy.ParallelCopy([targets[n] for n in rest], [sources[n] for n in rest]),
    )


def copy_limit_s(total_bytes: int) -> float:
    """Return for how long a copy of so many bytes is waited for, and not called a hang."""
    return COPY_S + total_bytes / COPY_BYTES_PER_S


def _no_progress() -> None:
    """Do nothing, for nobody who looks on."""


def snapshot_interval(cost_s: float, step_s: float, budget: float, seldom_s: float = MIN_INTERVAL_S) -> int:
    """Return the power of two K for which a copy every K steps stays within `budget` of the time.

    Not more often than every `seldom_s`: just-in-time copies bound what a fault costs, and a checkpoint
    needs the private states of a snapshot to stay while it is written.

    Powers of two, because each member may then choose its own and the private states of the ranks,
    kept by the ruler, still meet (see `holdfast.protocol.kept_steps`).
    """
    every = 1
    while every < MAX_INTERVAL and (cost_s > budget * step_s * every or step_s * every < seldom_s):
        every *= 2
    return every
