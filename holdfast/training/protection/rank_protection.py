"""Protect one rank's state: restore it, back it up in every step, and copy it before it can be lost.

`Protection` defines the order of events in a training loop. Other modules do the work: `private_backup` backs
up private state, `snapshot_schedule` takes snapshots, `late_changes` detects changes outside of the steps,
and `last_copies` makes the copies after a failure and at the end of the script.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.manifest import REPLICATED
from holdfast.errors import BadInput
from holdfast.fileio import safetensors
from holdfast.protocol.launcher_messages import SecureAnswer
from holdfast.snapshot.arena import SnapshotGone
from holdfast.snapshot.slot_file import lock_shared, unlock
from holdfast.state import restore as restoring
from holdfast.state.device import Device
from holdfast.state.module_flags import ModuleFlags
from holdfast.state.private_state import PrivateState
from holdfast.training.protection.committed_state import CommittedState
from holdfast.training.protection.last_copies import LastCopies, UncheckedNumbers
from holdfast.training.protection.late_changes import LateChanges
from holdfast.training.protection.private_backup import PrivateBackup
from holdfast.training.protection.snapshot_schedule import SnapshotSchedule
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank

_WRITER_S = 10.0  # how long to wait if a writer holds the lock of the slot to restore from


class Protection:
    """One rank's protection in one generation, from the restored state to the last commit.

    The listener's thread calls `snapshot_just_in_time`. The script's thread calls all other methods. The
    parts are public attributes, and callers may use a single part directly.
    """

    def __init__(
        self,
        rank: Rank,
        replicated: Mapping[str, Any],
        private: PrivateState,
        flags: ModuleFlags,
        gate: WriteGate,
        device: Device,
        directory: Path,
        numbers: UncheckedNumbers,
    ) -> None:
        """Set up all parts. `directory` is the member's arena."""
        self._rank, self._objects, self._private, self._flags = rank, replicated, private, flags
        self.committed = CommittedState(replicated, device, rank.warn_once)
        self.snapshots = SnapshotSchedule(
            rank, replicated, device, gate, self.committed, directory, self._document
        )
        # The group can resume from a snapshot only while the private states of its step exist, so they are
        # pinned.
        self.backup = PrivateBackup(rank, private, self.committed, directory, self.snapshots.arena.steps)
        self.changes = LateChanges(rank, private, device, gate, self.committed, self.backup, self.snapshots)
        self.last_copies = LastCopies(
            rank, device, gate, self.committed, self.backup, self.snapshots, numbers
        )
        self._is_restored = rank.launch.restore is None
        # The step that completed the last loop; -1 if the script left that loop early.
        self._completed_step = -1

    # -- before the first loop

    def restore(self) -> tuple[int, Mapping[str, bytes] | None]:
        """Restore the group's resume point, if any, into the objects.

        Returns the step, and the random states to be set when the loop starts. Raises `BadInput` if the state
        is from a different model. The message names the first tensor that differs.
        """
        found = self._rank.launch.restore
        if found is None:
            return 0, None
        path = Path(found.path)
        if found.source == "checkpoint":
            path = path / REPLICATED
        try:
            self._restore_replicated(path)
            blob = Path(self._rank.start.private).read_bytes()
            random_states = self._private.restore(blob)
            self.snapshots.expect(path.stat().st_size)
            self._is_restored = True
            return found.step, random_states
        except ValueError as error:  # the state is from a different model, or Holdfast did not write the file
            where = Path(found.path).name if found.source == "checkpoint" else f"step {found.step}"
            accepted = "resume with the model that it was saved with, or use another run directory"
            raise BadInput(f"{found.source} {where}: {error}; {accepted}") from None

    def _restore_replicated(self, path: Path) -> None:
        deadline = time.monotonic() + _WRITER_S
        while (lock := lock_shared(path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path}: still being written after {_WRITER_S:g} s")
            time.sleep(0.001)
        try:
            self._refuse_another(path)
            # Open the file again, because a mapping of the locked descriptor would hold the lock for as long
            # as the mapping exists.
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            layout = safetensors.parse(data)
            private = self._private
            for warning in restoring.restore(
                self._objects, layout, data, private.moved, private.own, self._read_document
            ):
                self._rank.warn_once(warning)
            if base := self._rank.launch.restore:
                self.snapshots.writer.restored(path, base.generation, base.step, layout.header)
        finally:
            unlock(lock)

    def _document(self) -> Mapping[str, Any]:
        """Return what a snapshot's document contains in addition to the objects."""
        return {**self._flags.document(), **self._rank.sizes.document()}

    def _read_document(self, document: Mapping[str, Any]) -> None:
        self._flags.restore(document)
        restore = self._rank.launch.restore
        self._rank.sizes.restore(document, restore.step if restore is not None else 0)

    def _refuse_another(self, path: Path) -> None:
        """Raise SnapshotGone if the locked slot `path` does not hold the snapshot to resume from.

        The sidecar checked the slot before the launcher killed the ranks of the previous generation. Some of
        these ranks may not have been frozen, because their sidecar was not connected or a signal had stopped
        them. Such a rank may have trained until it was killed, and may have overwritten the slot.
        """
        wanted = self._rank.launch.restore
        if wanted is None or wanted.source != "slot":
            return
        held = {each.path.name: (each.generation, each.step) for each in self.snapshots.arena.records()}
        if held.get(path.name) != (wanted.generation, wanted.step):
            raise SnapshotGone(f"the snapshot of step {wanted.step} was overwritten before it was restored")

    # -- the loop

    def before_loop(self, step: int, *, has_consulted: bool = True, is_adapted: bool = False) -> None:
        """Secure the state at the start of the loop. Collective.

        For `has_consulted` and `is_adapted`, see `LateChanges.before_loop`.
        """
        self.backup.begin_loop(step)
        self.snapshots.begin_loop(step)
        self._completed_step = -1
        self.changes.before_loop(step, has_consulted=has_consulted, is_adapted=is_adapted)

    def before_optimizer(self, step: int, *, skipped: bool = False) -> None:
        """Store the private state of `step` in two places before the optimizer writes that step. Collective.

        `skipped` means that no optimizer writes in this step, for example because a gradient scaler has found
        an overflow.
        """
        self.changes.before_optimizer(skipped=skipped)
        self.backup.before_optimizer(step)

    def after_commit(self, step: int) -> None:
        """Take a snapshot of `step` if one is due."""
        self.committed.steps_done += 1
        self.backup.after_commit()
        self.snapshots.after_commit(step)
        self.changes.after_commit()

    def after_loop(self, step: int) -> None:
        """Record that the loop was completed at `step`, and copy its final state if necessary."""
        self._completed_step = step
        self.snapshots.after_loop(step)

    # -- the end

    def keep_final_state(self) -> str:
        """Ensure that a snapshot has the script's final state. Return "", or the reason why it does not.

        No copy is made in two cases. If the script left its loop with `break`, it would train more steps when
        it starts again. If it changed the state after the loop, training cannot continue from that state,
        because the script may have loaded other weights for another purpose.
        """
        step = self._completed_step
        if not self.changes.has_begun_loop:
            return "the script ran no loop over state.steps(n)"
        if step < 0 or self.committed.step != step:
            return "the script left its loop before all steps were done"
        what = self.changes.change_after_last()
        if what is not None or step == self.snapshots.voided:
            return f"{what or 'protected state was changed'} after the last commit"
        if self._rank.local_rank:  # only the member's first rank makes copies
            return ""
        if self.snapshots.takes_none:
            return "--snapshot-every 0"
        return self.last_copies.at_end(step)

    def snapshot_just_in_time(self, generation: int, copy: bool = True) -> SecureAnswer:
        """Freeze this rank at the end of `generation`, and copy its state; see `LastCopies.just_in_time`."""
        return self.last_copies.just_in_time(generation, self._is_restored, copy)
