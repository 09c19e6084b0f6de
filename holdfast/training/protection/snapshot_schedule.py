"""Decide when this rank copies the replicated state into its member's arena, and which copies are kept.

The first rank of each member makes the copies: one soon after the start, and then one in each interval. By
default, the interval is derived from how long a copy and a step take. A copy from a device takes
several steps to complete. If the script changes a state after its commit, the copy is made again (`amend`) or
discarded (`void`).

A copy that waits for the end of the tail, a copy that is due, and a copy in progress can exist at the same
time, for different steps. Only the script's thread changes the first two (`CopyRequests`). The copy in
progress is separate from them, because the listener's thread may end it at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.protocol import progress, progress_writer
from holdfast.snapshot import member_directory, page_tables
from holdfast.state.change_detection import Footprint
from holdfast.state.device import Device, QueueMark
from holdfast.training.protection import snapshot_writer
from holdfast.training.protection.committed_state import CommittedState
from holdfast.training.protection.device_copy import HostPart
from holdfast.training.protection.snapshot_replacement import FIRST_AFTER_STEPS, SnapshotReplacement
from holdfast.training.protection.snapshot_writer import (
    PendingSnapshot,
    SnapshotWriter,
    WrittenDuringCopy,
    copy_limit_s,
)
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank

# Snapshots get this share of the time budget. The rest is for Holdfast's other work, inside and outside of
# the ranks.
SNAPSHOT_SHARE = 0.3
# If the share of the state that a copy reads changes by more than this, the cost is measured again.
OTHER_KIND = 0.1


@dataclass(frozen=True, slots=True)
class CopyRequests:
    """The copies that have not begun yet. Both can exist at the same time, for different steps."""

    deferred: int | None = None  # the step whose copy waits for the end of the tail
    due: tuple[int, QueueMark] | None = None  # a step to copy once the device reaches the mark


@dataclass(frozen=True, slots=True)
class CopyCost:
    """The expected cost of the next copy, and the properties of the copies that it was measured with."""

    seconds: float = 0.0  # 0 if no such copy has been measured
    share: float = 1.0  # the share of the state that is not frozen
    whole: bool = True  # whether the copies skipped no tensor
    read: float = 1.0  # the share of the state that the copies read

    def after(self, cost_s: float, coming: float, share: float, whole: bool, read: float) -> CopyCost:
        """Return the expected cost after a copy with these properties took `cost_s`.

        `coming` is the share of the state that copies will read once all slots are filled. The first copies
        read all frozen tensors. Later copies read only the parts that were written.
        """
        # Copying, comparing and skipping a tensor have different costs, so another kind of copy is measured
        # again.
        is_other = share > self.share or whole != self.whole or abs(read - self.read) > OTHER_KIND
        expected_s = cost_s * min(coming / read, 1.0) if read else cost_s
        known_s = 0.0 if is_other else self.seconds
        return CopyCost(min(expected_s, known_s or expected_s), share, whole, read)


class SnapshotSchedule:
    """Schedules one rank's snapshots. Threads other than the script's call only `held` and `end_transfer`.

    A thread must hold `copying` while it makes or discards a copy, because the listener's thread makes
    just-in-time copies.
    """

    def __init__(
        self,
        rank: Rank,
        replicated: Mapping[str, Any],
        device: Device,
        gate: WriteGate,
        committed: CommittedState,
        directory: Path,
        document: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Set up the schedule. `document` returns what a snapshot contains in addition to the objects."""
        self._rank, self._device, self._gate, self._committed = rank, device, gate, committed
        launch = rank.launch
        self._generation, self._asked_every = launch.generation, launch.snapshot_every
        base = (launch.restore.generation, launch.restore.step) if launch.restore else None
        other = launch.restore.other if launch.restore else ()
        pages = [directory.parent / member_directory.page_name(local) for local in range(launch.nproc)]
        self.writer = SnapshotWriter(
            directory,
            replicated,
            launch.world_size,
            base,
            rank.page.copied if rank.page is not None else None,
            device,
            partial(progress_writer.void_steps, pages, launch.generation),
            (other[0], other[1]) if len(other) == 2 else None,
            document,
        )
        self.arena = self.writer.arena
        self.copying = threading.Lock()
        self._every = max(launch.snapshot_every, 0)  # 0 if there is no interval or none has been chosen yet
        self._began = 0  # the step at the start of the loop
        self._requests = CopyRequests()
        self._transfer: PendingSnapshot | None = None  # the copy that is in progress on the device
        # Whether that copy has the state of a single step; None if this has not been checked yet.
        self._clean: bool | None = None
        self.defers = False  # whether to copy only after the tail, because the script changes the state in it
        self._replacement = SnapshotReplacement(launch.world_size <= 2 * launch.nproc)
        self._extra = -1  # the step of a copy that other members may not have
        self.voided = -1  # the last void step; no copy of it is kept
        # The void steps whose snapshots could not be discarded, because they are still being read.
        self._stale: list[int] = []
        self._cost = CopyCost()
        self.copy_s = 0.0  # an upper bound for the duration of a copy; limits are derived from it

    @property
    def takes_none(self) -> bool:
        """True if the user has requested no snapshots except at the start."""
        return self._asked_every == 0

    def held(self, step: int) -> bool:
        """Return True if there is a snapshot of this generation's `step`."""
        return self.writer.held(self._generation, step)

    def expect(self, state_bytes: int) -> None:
        """Estimate the duration of a copy from the size of the state, until a copy has been measured."""
        known_s = self.arena.cost_s(state_bytes)
        self.copy_s = max(known_s, state_bytes / progress.COPY_BYTES_S)
        if self._rank.page is not None:
            self._rank.page.note_state(state_bytes, known_s)

    # -- the loop

    def begin_loop(self, step: int) -> None:
        self._began = step

    def copy_at_start(self, step: int) -> None:
        """On the member's first rank, copy the state at the start of the loop."""
        if self._rank.local_rank == 0:
            self.copy(step)

    def after_commit(self, step: int) -> None:
        """Take a snapshot of `step` if one is due: in each interval, and once soon after the start.

        The early snapshot bounds the cost of a fault after which no rank can make a just-in-time copy. It
        also touches the memory of the slot for the first time. This would otherwise delay the first
        just-in-time copy.
        """
        done = self._committed.steps_done
        if done == 1:
            state_bytes = self.writer.prepare_layout()  # an optimizer has no state before its first step
            self.expect(state_bytes)
            self._map_slots(state_bytes)
        if self._asked_every < 0 and done == snapshot_writer.MIN_SAMPLES:
            self._choose_interval()
        if self._asked_every and self._rank.local_rank == 0:
            self._copy_if_due(step)

    def _copy_if_due(self, step: int) -> None:
        replacement, due = self._replacement, bool(self._every) and step % self._every == 0
        # If true, its snapshot is not in the arena yet.
        pending = self._transfer is not None or self._requests.due is not None
        if not pending:
            replacement.observe(step, self.arena.steps(self._generation), self._every)
        if due:
            replacement.interval_due()
        if due or step == self._began + FIRST_AFTER_STEPS or replacement.is_common(step):
            if self.defers:  # the script changed the state after the last commit, and may do so again
                self._requests = replace(self._requests, deferred=step)
            else:
                self._copy_due(step)
        elif replacement.is_due(step) and not pending and not self._stale:
            # No copy is made while a stale snapshot is the newest one, because the copy would overwrite the
            # older snapshot, which is valid.
            self._requests = replace(self._requests, deferred=step)
            if replacement.is_extra:
                self._extra = step

    def after_loop(self, step: int) -> None:
        """Copy the state at the end of a loop, because after a later fault, no rank may be able to copy it.

        Loops shorter than an interval get no copy, because a script may have many of them, such as one per
        epoch.
        """
        if self._device.queues:
            self.advance(must=True)
            with self.copying:
                self.end_transfer()
        long_enough = self._every and step - self._began >= self._every
        if long_enough and step != self.voided and not self.held(step) and self._committed.changed() is None:
            self.copy(step)

    def _map_slots(self, state_bytes: int) -> None:
        """Map the slots' pages into this process early, because a recovery may wait for the first copy."""
        if self._rank.local_rank or self._device.queues:  # with a device, pinning the slots maps them
            return
        if self.copying.acquire(blocking=False):
            try:
                page_tables.populate_ahead(self.arena, state_bytes)
            except OSError:  # if the problem persists, the copy will report it
                return
            finally:
                self.copying.release()

    def _choose_interval(self) -> None:
        step_s = self._rank.median_step_s()
        if step_s is None:
            return
        budget = self._rank.launch.snapshot_budget * SNAPSHOT_SHARE
        # If the only rank of a group fails, there is no survivor to make a just-in-time copy. So only the
        # budget limits the copies of such a rank.
        seldom_s = snapshot_writer.MIN_INTERVAL_S if self._rank.world_size > 1 else 0.0
        self._every = snapshot_writer.snapshot_interval(self._cost.seconds, step_s, budget, seldom_s)

    # -- states that the script changes after their commit

    def forget_stale(self) -> None:
        """Try again to discard the void snapshots that were being read in the last attempt."""
        if self._stale:
            self._stale = [step for step in self._stale if not self.forget(step)]

    def amend(self, now: Footprint) -> None:
        """Make the current state the state of the last commit, in all copies. Its footprint is `now`."""
        step, wanted = now.step, self._wants(now.step)
        with self.copying:
            self.end_transfer()
            whole = not self._gate.frozen and self.forget(step)
            if whole:
                self._committed.footprint = now
        self.note_late(step, whole)
        if wanted and whole:
            self._copy_due(step)

    def void(self, step: int) -> None:
        """Discard all copies of the state of `step`, because they lack changes that the script made later."""
        wanted, self.voided = self._wants(step), step
        self.note_late(step, amended=False)
        with self.copying:
            self.end_transfer()
            if not self._gate.frozen and not self.forget(step):
                self._stale.append(step)
        self._requests = CopyRequests()
        if wanted and self._asked_every:
            self._replacement.voided(step, self._every)

    def note_late(self, step: int, amended: bool) -> None:
        """Report that the state of `step` changed after its commit.

        `amended` means that the copies include the change.
        """
        if self._rank.page is not None:
            self._rank.page.note_late(step, amended)

    def forget(self, step: int) -> bool:
        """Discard the snapshot of `step`. Return False if it still exists because it is being read."""
        if self._rank.local_rank:  # the member's first rank discards snapshots
            return True
        forgotten = self.writer.forget(self._generation, step)
        self._replacement.forgot(self.arena.steps(self._generation))
        return forgotten

    def copy_deferred(self, step: int) -> None:
        """Make the deferred copy of `step`, if any, because its tail has ended without changing anything."""
        deferred = self._requests.deferred
        if deferred is None:
            return
        self._requests = replace(self._requests, deferred=None)
        if deferred == step:
            self._copy_due(step)

    def _wants(self, step: int) -> bool:
        """Return True if a snapshot of this step exists, is in progress or is due.

        The result is False if this rank does not take snapshots.
        """
        if self._rank.local_rank:
            return False
        due = self._requests.due
        pending = self._transfer.step if self._transfer is not None else due[0] if due else -1
        return step in (pending, self._requests.deferred) or self.held(step)

    def _copy_due(self, step: int) -> None:
        if self._device.queues:
            self._requests = CopyRequests(due=(step, self._device.mark()))
        else:
            self._requests = replace(self._requests, deferred=None)
            self.copy(step)

    # -- an immediate copy

    def copy(self, step: int, *, over_newer: bool = False) -> str:
        """Wait until the device has computed the current state, and copy it. Return "" or an error message.

        If all slots are in use, no copy is made, but this is not an error. For `over_newer`, see
        `SnapshotWriter.write_over`.
        """
        self._device.wait(self._device.mark())
        return self._guarded(lambda: self._copy_now(step, over_newer))

    def _copy_now(self, step: int, over_newer: bool) -> None:
        with self.copying:
            self.end_transfer()
            write = self.writer.write_over if over_newer else self.writer.write
            cost_s = write(self._generation, step)
        if cost_s is not None:
            self._note(step, cost_s)

    def _guarded(self, copy: Callable[[], None]) -> str:
        """Call `copy`, and count its time as Holdfast's, not as the step's. Return "" or an error message."""
        if self._rank.page is not None:
            self._rank.page.copy_begins(copy_limit_s(self.writer.expected_bytes()))
        try:
            copy()
        except OSError as error:
            self._rank.warn_once(
                f"no snapshot: {error}; training continues, and existing checkpoints are kept"
            )
            return f"no snapshot: {error}"
        finally:
            if self._rank.page is not None:
                self._rank.page.copy_ends()
        return ""

    def _note(self, step: int, cost_s: float, held_s: float | None = None) -> None:
        """Record the cost of a copy, and how long the host waited for it. None means the whole time."""
        self._committed.collected(self.writer.collected)
        self._replacement.made(step, self.arena.steps(self._generation))
        if step == self._extra:
            self.writer.overwrite_first = self._generation, step
        writer, frozen = self.writer, self.writer.frozen
        self._cost = self._cost.after(cost_s, frozen.coming, frozen.share, writer.was_whole, writer.was_read)
        self.copy_s = max(self.copy_s, cost_s)
        if self._rank.page is not None:
            self._rank.page.note_snapshot(step, cost_s, cost_s if held_s is None else held_s)
        if self._every and self._asked_every < 0:
            # Choose the interval again, because the machine may have been busy at the first choice.
            self._choose_interval()

    # -- a copy during training, on a device

    def keep_host_part(self) -> HostPart | None:
        """Return a copy of the host's part of the state, because the host may be a step ahead of the device.

        The result is None if the part is too large, or if the script has changed the state since its commit.
        """
        part = self.writer.keep()
        return part if part is None or self._committed.is_as_committed(part) else None

    def advance(self, *, must: bool = False) -> None:
        """On a device, end a copy that is complete, and begin a copy that is due.

        Without `must`, the host does not wait. `must` means that the optimizer's writes are about to be
        queued. The host then waits until the device has completed the previous step, and begins a copy that
        is due. The writes are delayed until the copy has ended. A copy is never queued before the previous
        step is complete, because it would hold the lock of its slot while it waits for work that a dead peer
        may block.
        """
        if self._gate.frozen:
            return
        transfer = self._transfer
        if transfer is not None and self._device.reached(transfer.offload.copy.marks[-1]):
            with self.copying:
                self.end_transfer()
        if self._requests.due is not None:
            step, mark = self._requests.due
            if must:
                self._device.wait(mark)
            if self._device.reached(mark):
                self._requests = replace(self._requests, due=None)
                self._guarded(lambda: self._begin_transfer(step))
        if must and self._transfer is not None:
            self._clean = self._committed.changed() is None  # check this before the optimizer's writes
            self.delay_writes()

    def delay_writes(self) -> None:
        """Delay all work that is queued in the current stream from now on until the copy has ended."""
        transfer = self._transfer
        if transfer is not None:
            self._device.hold_back(transfer.offload.copy)

    def _begin_transfer(self, step: int) -> None:
        with self.copying:
            self.end_transfer()
            if not self._gate.frozen and self._committed.changed() is None:
                self._clean = None
                self._transfer = self.writer.begin(self._generation, step)

    def end_transfer(self) -> None:
        """Wait for the copy in progress, if any, and commit it as a snapshot. The caller holds `copying`."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        clean = self._committed.changed() is None if self._clean is None else self._clean
        try:
            self._note(transfer.step, self.writer.finish(transfer, lambda: clean), held_s=0.0)
        except WrittenDuringCopy:  # the script has changed the state during the copy, without an optimizer
            return
