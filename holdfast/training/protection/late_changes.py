"""Detect changes to the state outside of the steps, after commits and in pauses, and warn of them once.

If the script changes shared state after a commit, such as a scheduler or an average, the change becomes part
of the state of that step. Copies that lack the change are made again. After any other change, no copy can
have the state of that step. All copies are then discarded, and the supervisor does not resume from that step.
In a pause, a script may swap weights as long as it puts the originals back.
"""

from __future__ import annotations

import time

from holdfast.state.change_detection import Footprint
from holdfast.state.device import Device
from holdfast.state.private_state import PrivateState
from holdfast.training.protection.committed_state import LOOK_CLOSELY, CommittedState
from holdfast.training.protection.private_backup import PrivateBackup
from holdfast.training.protection.snapshot_schedule import SnapshotSchedule
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank
from holdfast.worker.pauses import PauseHistory

LONG_S = 0.05  # after longer tails, which may be evaluations, private objects are also checked
IN_ROW = 8  # an object that makes this many consecutive steps void is treated as a prefetching loader


class LateChanges:
    """Tracks the changes that one rank's script makes to the protected state outside of its steps."""

    def __init__(
        self,
        rank: Rank,
        private: PrivateState,
        device: Device,
        gate: WriteGate,
        committed: CommittedState,
        backup: PrivateBackup,
        snapshots: SnapshotSchedule,
    ) -> None:
        self._rank, self._private, self._device, self._gate = rank, private, device, gate
        self._committed, self._backup, self._snapshots = committed, backup, snapshots
        self._pauses = PauseHistory()
        self._before_pause: str | None = None  # describes a change between the commit and the pause
        self._paused = False  # whether the script has paused since the last commit
        self._committed_s = 0.0  # the time of the last commit
        self._has_warned = False  # whether a warning of a change outside of a step was printed
        self._loops = 0  # the number of loops that have begun
        self._in_row = 0  # the number of consecutive void steps
        # The private objects that changed after `IN_ROW` consecutive commits, as a prefetching loader does.
        self._draw_ahead: set[str] = set()
        # The private objects that have changed after every one of the first commits so far.
        self._changed_each_time: set[str] | None = None

    @property
    def has_begun_loop(self) -> bool:
        return self._loops > 0

    def silence(self) -> None:
        """Suppress warnings of changes outside of a step, because their cause has already been reported."""
        self._has_warned = True

    # -- between two loops

    def before_loop(self, step: int, *, has_consulted: bool, is_adapted: bool = False) -> None:
        """Record the state at the start of the loop as the state of `step`; copy it if necessary.

        A copy is necessary if the script has changed the state, or if the state was not restored from a slot.
        `has_consulted` means that the script may have read the number of completed steps, and its work since
        `protect` may depend on that number. `is_adapted` means that the script has adapted the state to
        another number of ranks (`Session.on_resize`), as it must after the number has changed.
        """
        first, self._loops = not self._loops, self._loops + 1
        what = self._committed.changed()
        if what is not None:  # the script has changed the state, and the loop starts from the changed state
            if not is_adapted:
                self._warn_before_loop(what, step, first, has_consulted)
            whole = self._snapshots.forget(step) and not self._gate.frozen
            if not first:
                self._snapshots.note_late(step, whole)
            self._committed.search_parameters()
            self._committed.record(step)
            self._snapshots.copy_at_start(step)
            return
        restored = self._rank.launch.restore
        if restored is None or restored.source != "slot":
            self._snapshots.copy_at_start(step)

    def _warn_before_loop(self, what: str, step: int, first: bool, has_consulted: bool) -> None:
        if not first:
            self._rank.warn_once(
                f"{what}, between two loops: after a restart this change may be made twice or not at all,"
                " because Holdfast does not know whether it was made. Make it before commit() in the last"
                f" step of a loop, or in the next loop under `if step == {step}:`"
            )
        elif self._rank.launch.restore is not None:
            self._rank.warn_once(
                f"{what.partition(' after ')[0]} after protect() had restored it: load initial weights"
                " before protect(), or each restart begins with them again"
            )
        elif not has_consulted and self._is_loaded_over():
            self._rank.warn_once(
                f"{what.partition(' after ')[0]} between protect() and the first step: after a restart this"
                " would overwrite the restored state. Load initial weights before protect(), or under `if"
                " state.step == 0:`"
            )

    def _is_loaded_over(self) -> bool:
        """Return True if the script itself, and not DDP, has changed a parameter's values since `protect`.

        Only rank 0 is checked, because DDP copies rank 0's values to all ranks, possibly after `protect`.
        """
        since, footprints = self._committed.footprint, self._committed.footprints
        if since is None or self._rank.number != 0 or footprints.first_write(since) is None:
            return False
        return footprints.renew(since) is None

    # -- after a commit

    def after_commit(self) -> None:
        """Record the start of the tail. Call this when all work of the commit is complete."""
        self._committed_s = time.monotonic()  # excludes the time of the copy, which is not the script's

    def after_tail(self) -> None:
        """At the end of the tail, check whether the script changed protected state in it.

        If so, this amends the step or makes it void.
        """
        since, new = self._committed.footprint, self._committed.in_tail
        paused, self._paused = self._paused, False
        self._committed.tail_is_over()
        if since is None or not new:
            return
        self._snapshots.forget_stale()
        long = paused or time.monotonic() - self._committed_s > LONG_S
        shared, own = self._shared_change(since, paused), self._own_change(since, paused, long)
        self._backup.after_tail(since.step, paused)
        self._snapshots.defers = shared is not None
        if own is not None:
            self._snapshots.void(since.step)
        elif shared is not None:
            self._snapshots.amend(self._committed.footprints.footprint(since.step, paused))
        else:
            self._snapshots.copy_deferred(since.step)
        if shared is not None and self._committed.steps_done == LOOK_CLOSELY:
            self._warn_of_private_part()
        if not self._has_warned and (own or shared) is not None:
            self._has_warned = True
            self._rank.warn_once(
                f"{own or shared} after the commit of step {since.step} and before the next step. A fault or"
                " a stop at that moment may lose this change: make it at the start of the next step, before"
                " optimizer.step(), or, if it is a scheduler's, between optimizer.step() and commit()"
            )

    def _warn_of_private_part(self) -> None:
        """Warn of private objects that are classified as data but change in each tail, like shared state."""
        follows = self._private.no_data(self._changed_each_time or set())
        if follows:
            self._rank.warn_once(
                f"{' and '.join(follows)}, private to a rank, is also changed after each commit: a fault at"
                " that point undoes the change since the last commit (a data loader loads its data again)."
                " If it follows the steps, as a scheduler does, change it before commit(), or set its"
                " attribute holdfast_private = False if it is the same on all ranks"
            )

    def _shared_change(self, since: Footprint, paused: bool) -> str | None:
        """Describe what has changed in the shared state since the commit; return None if nothing has."""
        footprints = self._committed.footprints
        what = footprints.first_change(since) if paused else footprints.first_write(since)
        return what or footprints.late_change(since)

    def _own_change(self, since: Footprint, paused: bool, long: bool) -> str | None:
        """Describe which private object has changed since the commit.

        The result is None if no object has changed or none was checked. An object that also changes in short
        tails is ignored, because it may be a prefetching loader.
        """
        early = self._committed.steps_done <= LOOK_CLOSELY
        if not (long or early):
            return None
        changed = self._backup.changed_objects()
        late = self._changed_only_now(changed, paused) if early else changed - self._data()
        if not late:
            return None
        self._in_row = self._in_row + 1 if self._snapshots.voided == since.step - 1 else 1
        if self._in_row > IN_ROW:  # without a snapshot, a fault would cost all of these steps
            self._draw_ahead |= late
            self._rank.warn_once(
                f"{' and '.join(sorted(late))}, private to a rank, was changed after {IN_ROW} commits in a"
                " row, so it is treated as a prefetching loader: a fault undoes its change since the last"
                " commit. Change it before optimizer.step()"
            )
            return None
        return f"{min(late)} was changed"

    def _changed_only_now(self, changed: set[str], paused: bool) -> set[str]:
        """Return the `changed` objects, except those that have also changed after every earlier commit.

        An object that changes after each commit either prefetches, as a loader does, or follows the steps.
        Call this only for the first commits of a generation.
        """
        so_far = self._changed_each_time
        if not paused:
            self._changed_each_time = changed if so_far is None else so_far & changed
        if so_far is None:
            return changed if paused else set()
        return changed - so_far

    def _data(self) -> set[str]:
        """Return the private objects that are classified as data, so they may change after a commit."""
        return self._draw_ahead | (self._changed_each_time or set())

    def change_after_last(self) -> str | None:
        """Describe what has changed since the last commit of the last loop; return None if nothing has."""
        since, footprints = self._committed.footprint, self._committed.footprints
        assert since is not None
        own = self._backup.changed_objects() - self._data()
        what = footprints.first_change(since) or footprints.late_change(since)
        if what is None and (named := self._private.no_data(own)):
            return f"{' and '.join(named)} was changed"
        return what

    # -- before the optimizer

    def before_optimizer(self, *, skipped: bool) -> None:
        """In the first steps, warn if the script has changed shared state before the optimizer's writes.

        `skipped` means that no optimizer writes in this step, for example because a gradient scaler has found
        an overflow. Changes in such a step (to the scale, for example) are allowed.
        """
        if self._committed.steps_done > LOOK_CLOSELY or self._has_warned or skipped:
            return
        if (what := self._committed.changed()) is not None:
            self._has_warned = True
            self._rank.warn_once(
                f"{what}, before optimizer.step(): a fault at that point costs the steps since the last "
                "snapshot. Change protected state between optimizer.step() and commit()"
            )

    # -- pauses

    def before_pause(self, label: str, step: int) -> None:
        """Copy the state before a pause that may change it, so that losing a peer costs no steps."""
        self._pauses.began(label, time.monotonic())
        if self._device.queues:
            self._snapshots.advance(must=True)
        wanted = not self._snapshots.takes_none and self._pauses.wants_copy(label, self._snapshots.copy_s)
        held = not wanted or self._snapshots.held(step)
        self._before_pause = self._committed.changed()
        if not held and self._before_pause is None and not self._gate.frozen:
            self._snapshots.copy(step)

    def forward_in_pause(self) -> None:
        """Check whether the script swapped weights in before it called a module."""
        if not self._pauses.known and self._committed.changed() is not None:
            self._pauses.writes()

    def after_pause(self, label: str) -> None:
        """Record how the pause changed the state. Restored weights are treated as unchanged."""
        what, since = self._committed.changed(), self._committed.footprint
        self._paused = True
        if what is not None and since is not None and self._before_pause is None:
            self._pauses.writes()
            back = self._committed.footprints.renew(since)
            if back is not None:
                self._committed.footprint = back
            else:
                self._has_warned = True
                self._rank.warn_once(
                    f"{what}, in the pause {label!r}, and was not restored: a fault at that point may cost"
                    " the steps since the last snapshot. Undo such a change before the pause ends, or make"
                    " it before commit()"
                )
        self._pauses.ended(time.monotonic())
