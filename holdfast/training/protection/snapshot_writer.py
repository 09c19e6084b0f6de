"""Copy the replicated state into the arena: in each interval, and just in time when a peer has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.protocol.defaults import SNAPSHOT_SLOTS
from holdfast.snapshot import tensor_copy
from holdfast.snapshot.arena import Arena
from holdfast.state import capture
from holdfast.state.cached_capture import CachedCollector
from holdfast.state.capture import JSON_ENTRY
from holdfast.state.device import Broken, Device, HostDevice, PinnedMemory
from holdfast.training.protection.device_copy import AsyncCopy, HostPart, Tensors, TensorSplit
from holdfast.training.protection.frozen_tensors import FrozenTensors, SkippedTensors

if TYPE_CHECKING:
    import torch

    from holdfast.fileio.safetensors import Layout
    from holdfast.snapshot.arena import SlotWriter
    from holdfast.snapshot.commit_records import CommitRecord


MIN_SAMPLES = 8  # this many steps are measured before the automatic interval is chosen
MAX_INTERVAL = 1 << 14
MIN_INTERVAL_S = 1.0
READER_S = 0.3  # how long to wait for a slot that is being read; a recovery waits for this copy
PAUSE_S = 0.002
# A device copy never waits for other work, so one that makes no progress for this long is stuck.
COPY_LIMIT_S = 10.0

# The duration and speed of the slowest copy to be expected, if memory is swapped or throttled.
COPY_S, COPY_BYTES_PER_S = 20.0, 50e6


class WrittenDuringCopy(Exception):
    """The state was written while it was being copied."""


@dataclass(slots=True)
class _Targets:
    """The targets of the tensors in one slot. They are valid until its mapping or the layout changes."""

    data: memoryview
    layout: Layout
    views: list[torch.Tensor]
    copying: tensor_copy.ParallelCopy | None  # copies all tensors; None if they are on a device
    # For a copy that skips tensors: the skipped tensors, the comparison of their written stretches, and the
    # copy of all other tensors.
    partial_copies: tuple[SkippedTensors, tensor_copy.ParallelCopy, tensor_copy.ParallelCopy] | None = None


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A copy from the device that is in progress. It holds its slot until it is finished."""

    generation: int
    step: int
    offload: AsyncCopy
    draft: SlotWriter


class SnapshotWriter:
    """Writes the rank's replicated state into its member's arena."""

    def __init__(
        self,
        directory: Path,
        objects: Mapping[str, Any],
        world_size: int,
        base: tuple[int, int] | None = None,
        on_progress: Callable[[], None] | None = None,
        device: Device | None = None,
        void: Callable[[], frozenset[int]] = frozenset,
        second_base: tuple[int, int] | None = None,
        extra_document: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Set up the writer without copying anything.

        Args:
            directory: the member's arena.
            objects: the replicated objects.
            world_size: the number of ranks, which is recorded with each snapshot.
            base: the (generation, step) of the snapshot that the group resumed from. It is kept until this
                generation has a snapshot.
            on_progress: called by any thread after it has copied a piece.
            device: the device of the tensors; None if they are on the host.
            void: returns the steps of this generation whose state a rank of this member has changed after the
                commit.
            second_base: the (generation, step) of a second snapshot that the group could have resumed from,
                if any.
            extra_document: returns what the snapshot's document contains in addition to the objects.
        """
        self.arena = Arena(directory)
        self._on_progress = on_progress or _no_progress
        self._void = void
        self._base = base
        self._second_base = second_base
        self._collector = CachedCollector(objects, extra_document)
        self.frozen = FrozenTensors(objects)
        self.collected: Tensors | None = None  # the tensors of the last copy
        self.was_whole = True  # whether the last copy skipped no tensor
        self.was_read = 1.0  # the share of the state's bytes that the last copy copied or compared
        self._world_size = world_size
        self._device: Device = device or HostDevice()
        self._targets: dict[int, _Targets] = {}
        self._json_bytes = 0
        self._layout: tuple[Tensors, int, Layout] | None = None
        self._division: TensorSplit | None = None
        self._pinned: dict[int, tuple[memoryview, PinnedMemory | None]] = {}
        self._peers_failed = False
        self.overwrite_first: tuple[int, int] | None = None  # a snapshot to overwrite before any other

    def held(self, generation: int, step: int) -> bool:
        """Return True if the arena has a snapshot of this step, even if another rank has written it."""
        return any((r.generation, r.step) == (generation, step) for r in self.arena.records())

    def write(
        self,
        generation: int,
        step: int,
        host_part: HostPart | None = None,
        is_unchanged: Callable[[], bool] = lambda: True,
        over: CommitRecord | None = None,
    ) -> float | None:
        """Copy the current state, as the state of `step`, into an empty slot or over the oldest snapshot.

        A snapshot that must be kept is not overwritten (see `_kept`). If `over` is given and still exists,
        that snapshot is overwritten instead of the oldest.

        On a device, the host's objects may already belong to a later step. `host_part` is then the copy of
        the host's part kept at `step`.

        Returns how many seconds the copy took, or None if the slot was locked because a checkpoint was being
        written from it.

        Raises:
            WrittenDuringCopy: `is_unchanged`, which is called after the copy, has returned False.
            OSError: the memory volume is full. The slots keep their contents.
            Broken: the device has failed.
        """
        began = time.perf_counter()
        if self._device.queues:
            transfer = self.begin(generation, step, host_part, over)
            return None if transfer is None else self.finish(transfer, is_unchanged)
        tensors, document = self._collector.collect()
        self.collected = tensors
        draft = self._draft(tensors, document, generation, step, over)
        if draft is None:
            return None
        with draft:
            whole = self._copy(tensors, draft)
            if not is_unchanged():
                raise WrittenDuringCopy(f"step {step}")
            self.frozen.wrote(tensors, draft.commit(), draft.layout.header)
        cost_s = time.perf_counter() - began
        self.was_whole = whole
        if whole:
            self.arena.note_cost(draft.layout.total_bytes, cost_s)
        return cost_s

    def _copy(self, tensors: Tensors, draft: SlotWriter) -> bool:
        """Copy the host's tensors that the slot does not hold yet. Return True if no tensor was skipped."""
        targets = self._targets_of(tensors, draft)
        assert targets.copying is not None
        left_out = self.frozen.take_left_out(tensors, draft.before, draft.layout.header)
        if not left_out.places:
            self.was_read = 1.0
            targets.copying.run(self._on_progress)
            return True
        total = sum(tensor.nbytes for _, tensor in tensors) or 1
        spared = sum(tensors[n][1].nbytes for n in left_out.places) - left_out.bytes
        self.was_read = 1.0 - spared / total
        if targets.partial_copies is None or targets.partial_copies[0] != left_out:
            targets.partial_copies = (
                left_out,
                *_split_copies(left_out, targets.views, [tensor for _, tensor in tensors]),
            )
        _, comparing, copying = targets.partial_copies
        comparing.run(self._on_progress)
        copying.run(self._on_progress)
        if comparing.differed:
            self.frozen.distrust()
        return False

    def restored(self, path: Path, generation: int, step: int, header: bytes) -> None:
        """Record that the objects were restored from the slot at `path`, so it holds the frozen tensors."""
        tensors, _ = self._collector.collect()
        for record in self.arena.records():
            if (record.path, record.generation, record.step) == (path, generation, step):
                self.frozen.restored(tensors, record, header)

    def begin(
        self,
        generation: int,
        step: int,
        host_part: HostPart | None = None,
        over: CommitRecord | None = None,
    ) -> PendingSnapshot | None:
        """Start copying the whole state from the device. On return, the host's part has been copied.

        For the arguments, see `write`. The result is None if the slot was locked. The copy does not wait for
        other work, so it completes as long as the device works.
        """
        division, text = self._divided() if host_part is None else (host_part.division, host_part.text)
        draft = self._draft(division.of, text, generation, step, over)
        if draft is None:
            return None
        try:
            targets = self._targets_of(division.of, draft)
            if not self._peers_failed:
                self._pin(draft)
            return PendingSnapshot(
                generation, step, AsyncCopy(self._device, division, host_part, targets.views), draft
            )
        except BaseException:
            draft.abandon()
            raise

    def finish(self, transfer: PendingSnapshot, is_unchanged: Callable[[], bool] = lambda: True) -> float:
        """Wait for a copy to end, and commit it as a snapshot. Return the copy's duration in seconds.

        Raises:
            WrittenDuringCopy: `is_unchanged`, which is called after the copy, has returned False.
            Broken: the copy does not end. The slot stays locked, because the device may write into it while
                this process lives.
        """
        for mark in transfer.offload.copy.marks:
            if not self._device.wait(mark, COPY_LIMIT_S):
                raise Broken(f"a copy from the device has not moved for {COPY_LIMIT_S:.0f} s")
            self._on_progress()
        with transfer.draft as draft:
            if not is_unchanged():
                raise WrittenDuringCopy(f"step {transfer.step}")
            cost_s = transfer.offload.finish()
            draft.commit()
        self.arena.note_cost(draft.layout.total_bytes, cost_s)
        return cost_s

    def keep(self) -> HostPart | None:
        """Return a copy of the host's part of the current state; None if that part is too large."""
        division, text = self._divided()
        return division.keep(text)

    def _divided(self) -> tuple[TensorSplit, str]:
        tensors, text = self._collector.collect()
        self.collected = tensors
        if self._division is None or self._division.of is not tensors:
            self._division = TensorSplit(tensors, self._device)
        return self._division, text

    def _draft(
        self,
        tensors: Tensors,
        document: str,
        generation: int,
        step: int,
        over: CommitRecord | None,
    ) -> SlotWriter | None:
        """Return a writer for the slot, filled except for the tensors; None if the slot is locked."""
        text = capture.padded(document, self._json_bytes)
        self._json_bytes = len(text)
        layout = self._layout_of(tensors, len(text))
        kept = self._kept(generation)
        draft = self.arena.begin(layout, generation, step, self._world_size, kept, over)
        if draft is not None:
            entry = draft.layout[JSON_ENTRY]
            draft.data[entry.begin : entry.end] = text
        return draft

    def prepare_layout(self) -> int:
        """Compute the layout of the current state for use in later copies. Return its size in bytes."""
        tensors, document = self._collector.collect()
        text = capture.padded(document, self._json_bytes)
        self._json_bytes = len(text)
        return self._layout_of(tensors, len(text)).total_bytes

    def expected_bytes(self) -> int:
        """Return the expected size of the next snapshot in bytes. Compute the layout if there is none yet."""
        return self._layout[2].total_bytes if self._layout is not None else self.prepare_layout()

    def _layout_of(self, tensors: Tensors, json_bytes: int) -> Layout:
        """Return the layout. Recompute it only if `tensors` is another list or the JSON has another size."""
        if self._layout is None or self._layout[0] is not tensors or self._layout[1] != json_bytes:
            self._layout = (tensors, json_bytes, capture.layout_of(tensors, json_bytes))
        return self._layout[2]

    def _kept(self, generation: int) -> frozenset[tuple[int, int]] | None:
        """Return the (generation, step) of the snapshots that must be kept; None means the newest snapshot.

        A valid snapshot takes precedence over a newer void snapshot, which the sidecar discards only after a
        few steps. The base takes precedence over newer snapshots of the previous generation, because those
        were rolled back.
        """
        found = frozenset((record.generation, record.step) for record in self.arena.records())
        own = {age for age in found if age[0] == generation}
        if own and len(found) == SNAPSHOT_SLOTS:
            late = self._void()
            void = {age for age in own if age[1] in late}
            if void and (good := {age for age in found - void if age in own or age == self._base}):
                return frozenset(good)
        if self.overwrite_first in found and len(found) > 1:
            return frozenset(found - {self.overwrite_first})
        return None if own or self._base is None else frozenset({self._base})

    def forget(self, generation: int, step: int) -> bool:
        """Discard the snapshot of this step, because the script changed the state after the commit.

        Returns False if the snapshot still exists because another process is reading it.
        """
        for record in self.arena.records():
            if (record.generation, record.step) == (generation, step):
                self.arena.forget(record)
        return not self.held(generation, step)

    def write_just_in_time(
        self,
        generation: int,
        step: int,
        host_part: HostPart | None = None,
        is_unchanged: Callable[[], bool] = lambda: True,
    ) -> float | None:
        """Write as `write` does, but without waiting for anything that a dead peer could block.

        If a checkpoint is being written from the snapshot to be overwritten, the other snapshot is
        overwritten instead. If the other snapshot must be kept, this waits up to `READER_S` for the reader.
        """
        self._peers_failed = True
        give_up_at = time.monotonic() + READER_S
        cost_s = self.write(generation, step, host_part, is_unchanged)
        while cost_s is None and not self.held(generation, step):
            if (other := self._second_choice(generation)) is not None:
                cost_s = self.write(generation, step, host_part, is_unchanged, over=other)
            if cost_s is not None or time.monotonic() > give_up_at:
                break
            time.sleep(PAUSE_S)
            cost_s = self.write(generation, step, host_part, is_unchanged)
        return cost_s

    def write_over(self, generation: int, step: int) -> float | None:
        """Write as `write` does, but over the other snapshot, because the first choice is being read."""
        return self.write(generation, step, over=self._second_choice(generation))

    def _second_choice(self, generation: int) -> CommitRecord | None:
        """Return the snapshot to overwrite if `write`'s first choice is being read.

        The result is None unless there are two snapshots and the group could resume from both.
        """
        records = self.arena.records()
        good = (self._base, self._second_base)
        if any(
            each.generation != generation and (each.generation, each.step) not in good for each in records
        ):
            return None
        first_choice = self.arena.next_overwritten(self._kept(generation))
        if first_choice is None:
            return None
        return next((each for each in records if each.slot != first_choice.slot), None)

    def _targets_of(self, tensors: Tensors, draft: SlotWriter) -> _Targets:
        """Return the target of each tensor. Recompute the targets if the mapping or layout has changed."""
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
        """Page-lock the slot, once for each mapping, because the device's copy engine is slower otherwise."""
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
    """Return the comparison of the stretches that may differ, and the copy of the tensors not skipped."""
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
    """Return the time in seconds after which a copy of `total_bytes` is treated as a hang."""
    return COPY_S + total_bytes / COPY_BYTES_PER_S


def _no_progress() -> None:
    """Do nothing. This is the default for `on_progress`."""


def snapshot_interval(cost_s: float, step_s: float, budget: float, seldom_s: float = MIN_INTERVAL_S) -> int:
    """Return the smallest power of two K such that a copy every K steps takes at most `budget` of the time.

    `budget` is a share of the time, from 0 to 1. Copies are at least `seldom_s` apart. More frequent copies
    are unnecessary, because just-in-time copies bound the cost of a fault. They could also displace private
    states that a checkpoint in progress needs.

    K is a power of two so that all members keep the private states of some common steps, although each member
    chooses its own interval (see `holdfast.protocol.kept_steps`).
    """
    every = 1
    while every < MAX_INTERVAL and (cost_s > budget * step_s * every or step_s * every < seldom_s):
        every *= 2
    return every
