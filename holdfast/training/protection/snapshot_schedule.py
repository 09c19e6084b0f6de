"""When this rank copies the replicated state into its member's arena, and which copies are kept.

The first rank of each member copies: at the interval, which by default follows from what a copy and a step
take, and once soon after the start. On a device the copy is begun here and ended steps later. A copy of a
state that the script changed after its commit is made again (`amend`), or forgotten (`void`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
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

SNAPSHOT_SHARE = 0.3  # of the budget; the rest is for all else that Holdfast does in and beside the ranks
OTHER_KIND = 0.1  # of the state: a copy that reads so much more or less than the last is of another cost


class SnapshotSchedule:
    """One rank's snapshots. All but `keep_host_part` and `end_transfer` are for the script's thread.

    `copying` is held while a copy is made or forgotten: the listener's thread makes just-in-time copies.
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
        """`document` gives what a snapshot contains beside the objects."""
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
        self._every = max(launch.snapshot_every, 0)  # 0: none by an interval, or not chosen yet
        self._began = 0  # the step that the loop started from
        self._due: tuple[int, QueueMark] | None = None  # step, once the device is there
        self._transfer: PendingSnapshot | None = None  # the copy that is under way on the device
        self._clean: bool | None = None  # whether it has copied one step's state; None: still to be checked
        self.defers = False  # copy the state when the work after the commit is over: it changes the state
        self._deferred: int | None = None  # the step whose copy waits for that
        self._replacement = SnapshotReplacement(launch.world_size <= 2 * launch.nproc)
        self._extra = -1  # the step of a copy that other members may not have
        self.voided = -1  # the last step of which no copy is kept
        self._stale: list[int] = []  # steps whose snapshots are to be forgotten and were being read
        self._cost_s = 0.0  # of a copy of the kind that the last one was, comparing what is frozen
        self._share = 1.0  # of the state that is not frozen
        self._whole = True  # the copies whose cost is known left nothing out
        self._read = 1.0  # of the state, by these copies
        self.copy_s = 0.0  # what a copy of the state may take: for limits

    @property
    def takes_none(self) -> bool:
        """True when the user wants no snapshots but the one at the start."""
        return self._asked_every == 0

    def held(self, step: int) -> bool:
        """True when there is a snapshot of this generation's `step`."""
        return self.writer.held(self._generation, step)

    def expect(self, state_bytes: int) -> None:
        """Learn how large the state is: how long a copy may take follows from it before one has been made."""
        known_s = self.arena.cost_s(state_bytes)
        self.copy_s = max(known_s, state_bytes / progress.COPY_BYTES_S)
        if self._rank.page is not None:
            self._rank.page.note_state(state_bytes, known_s)

    # -- the loop

    def begin_loop(self, step: int) -> None:
        self._began = step

    def copy_at_start(self, step: int) -> None:
        """Copy the state that the loop starts from, on the member's first rank."""
        if self._rank.local_rank == 0:
            self.copy(step)

    def after_commit(self, step: int) -> None:
        """Take a snapshot of `step` if one is due: at the interval, and once soon after the start.

        Without the second a fault that leaves no rank to copy just in time would cost all steps since then,
        and the first copy just in time would have to fill memory that was never touched.
        """
        done = self._committed.steps_done
        if done == 1:
            state_bytes = self.writer.state_bytes()  # an optimizer has no state before its first step
            self.expect(state_bytes)
            self._meet_slots(state_bytes)
        if self._asked_every < 0 and done == snapshot_writer.MIN_SAMPLES:
            self._choose_interval()
        if self._asked_every and self._rank.local_rank == 0:
            self._copy_if_due(step)

    def _copy_if_due(self, step: int) -> None:
        replacement, due = self._replacement, bool(self._every) and step % self._every == 0
        pending = self._transfer is not None or self._due is not None  # its slot may be empty as yet
        if not pending:
            replacement.look(step, self.arena.steps(self._generation), self._every)
        if due:
            replacement.regular()
        if due or step == self._began + FIRST_AFTER_STEPS or replacement.meets(step):
            if self.defers:  # the script changed the state after the last commit, and perhaps does so again
                self._deferred = step
            else:
                self._copy_due(step)
        elif replacement.is_due(step) and not pending and not self._stale:  # else the void one is the newest
            self._deferred = step
            if replacement.is_extra:
                self._extra = step

    def after_loop(self, step: int) -> None:
        """The loop is over: copy its state, for a rank that is lost from now on may find no other left.

        Not after a loop of less than an interval: there may be many, one for each epoch.
        """
        if self._device.queues:
            self.advance(must=True)
            with self.copying:
                self.end_transfer()
        long_enough = self._every and step - self._began >= self._every
        if long_enough and step != self.voided and not self.held(step) and self._committed.changed() is None:
            self.copy(step)

    def _meet_slots(self, state_bytes: int) -> None:
        """Let the copies of this process find the pages of the slots: the first may be one just in time."""
        if self._rank.local_rank or self._device.queues:  # a device's slots are pinned, and so met
            return
        if self.copying.acquire(blocking=False):
            try:
                page_tables.populate_ahead(self.arena, state_bytes)
            except OSError:  # then the copy says what is wrong, if it is still so
                return
            finally:
                self.copying.release()

    def _choose_interval(self) -> None:
        step_s = self._rank.median_step_s()
        if step_s is None:
            return
        budget = self._rank.launch.snapshot_budget * SNAPSHOT_SHARE
        # A rank alone has no survivor that could copy just in time: then the budget alone decides.
        seldom_s = snapshot_writer.MIN_INTERVAL_S if self._rank.world_size > 1 else 0.0
        self._every = snapshot_writer.snapshot_interval(self._cost_s, step_s, budget, seldom_s)

    # -- states that the script changes after their commit

    def forget_stale(self) -> None:
        """Try again to forget the snapshots that were being read when they should have been."""
        self._stale = [step for step in self._stale if not self.forget(step)]

    def amend(self, now: Footprint) -> None:
        """Let the state of the last commit be the present one, in all copies."""
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
        """Keep no copy of the state of `step`: it lacks what the script has changed since."""
        wanted, self.voided = self._wants(step), step
        self.note_late(step, amended=False)
        with self.copying:
            self.end_transfer()
            if not self._gate.frozen and not self.forget(step):
                self._stale.append(step)
        self._due = self._deferred = None
        if wanted and self._asked_every:
            self._replacement.voided(step, self._every)

    def note_late(self, step: int, amended: bool) -> None:
        """Report that the state of `step` was changed after its commit; `amended`: copies have the change."""
        if self._rank.page is not None:
            self._rank.page.note_late(step, amended)

    def forget(self, step: int) -> bool:
        """Forget the snapshot of `step`; False when it exists all the same."""
        if self._rank.local_rank:  # its member's first rank does that
            return True
        forgotten = self.writer.forget(self._generation, step)
        self._replacement.forgot(self.arena.steps(self._generation))
        return forgotten

    def copy_deferred(self, step: int) -> None:
        """The work after the commit of `step` is over and has changed nothing: make the copy that waited."""
        deferred, self._deferred = self._deferred, None
        if deferred == step:
            self._copy_due(step)

    def _wants(self, step: int) -> bool:
        """True when a snapshot of this step is there, on its way, or due; never on a rank that takes none."""
        if self._rank.local_rank:
            return False
        pending = self._transfer.step if self._transfer is not None else self._due[0] if self._due else -1
        return step in (pending, self._deferred) or self.held(step)

    def _copy_due(self, step: int) -> None:
        self._deferred = None
        if self._device.queues:
            self._due = step, self._device.mark()
        else:
            self.copy(step)

    # -- a copy at once

    def copy(self, step: int, *, over_newer: bool = False) -> str:
        """Copy the present state, when the device has made it. Returns what failed, "" for nothing.

        A slot that is in use is no failure: then there is no copy. `over_newer`: see
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
        """Call `copy`, which is Holdfast's work and no part of the rank's step. Returns as `copy` does."""
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
        """Record what a copy took, and how long the host was held up by it, if not for all of that."""
        self._committed.search_parameters()
        self._replacement.made(step, self.arena.steps(self._generation))
        if step == self._extra:
            self.writer.extra = self._generation, step
        frozen = self.writer.frozen
        share, whole, read = frozen.share, self.writer.was_whole, self.writer.was_read
        if share > self._share or whole != self._whole or abs(read - self._read) > OTHER_KIND:
            self._cost_s = 0.0  # comparing takes another time than copying, and than leaving out
        self._share, self._whole, self._read = share, whole, read
        # The first copies read all that is frozen, those that follow only what is written of it.
        expected_s = cost_s * min(frozen.coming / read, 1.0) if read else cost_s
        self._cost_s = min(expected_s, self._cost_s or expected_s)
        self.copy_s = max(self.copy_s, cost_s)
        if self._rank.page is not None:
            self._rank.page.note_snapshot(step, cost_s, cost_s if held_s is None else held_s)
        if self._every and self._asked_every < 0:
            self._choose_interval()  # again: the machine may have been busy when it was first chosen

    # -- a copy beside the training, on a device

    def keep_host_part(self) -> HostPart | None:
        """Return what the host has of the state: it may be a step ahead when the device's is copied.

        Nothing of a state that the script has written since its commit.
        """
        part = self.writer.keep()
        return part if part is None or self._committed.is_as_committed(part) else None

    def advance(self, *, must: bool = False) -> None:
        """On a device: begin and end the copy that is due. The host waits for none.

        `must`: the optimizer's writes are about to be queued. A copy that has not begun begins now, once the
        device has done the step before, and the writes begin when the copy has ended. It is never queued
        before: it would wait, with its slot, for what a dead peer may keep from ending.
        """
        if self._gate.frozen:
            return
        transfer = self._transfer
        if transfer is not None and self._device.reached(transfer.offload.copy.marks[-1]):
            with self.copying:
                self.end_transfer()
        if self._due is not None:
            step, mark = self._due
            if must:
                self._device.wait(mark)
            if self._device.reached(mark):
                self._due = None
                self._guarded(lambda: self._begin_transfer(step))
        if must and self._transfer is not None:
            self._clean = self._committed.changed() is None  # from now on the optimizer writes
            self.delay_writes()

    def delay_writes(self) -> None:
        """Let what is queued from now on, in the present stream, begin when the copy under way has ended."""
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
        """Make a snapshot of the copy that is under way, once it has ended. `copying` is held."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        clean = self._committed.changed() is None if self._clean is None else self._clean
        try:
            self._note(transfer.step, self.writer.finish(transfer, lambda: clean), held_s=0.0)
        except WrittenDuringCopy:  # the script has written the state meanwhile, without an optimizer
            return
