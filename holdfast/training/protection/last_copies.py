"""Copy the state outside the schedule: after a failure, before bad numbers are written, and at the end.

The listener's thread makes a just-in-time copy no matter what the script's thread is doing: waiting for a
dead peer in a collective, running a kernel, or working between two steps. The copy is refused unless the
state of a committed step is whole.
"""

from __future__ import annotations

import time
from typing import Protocol

from holdfast.errors import BadInput
from holdfast.protocol import progress
from holdfast.protocol.launcher_messages import NO_ROOM, SecureAnswer
from holdfast.state.device import Broken, Device
from holdfast.state.gradients import StepNumbers
from holdfast.training.protection.committed_state import CommittedState
from holdfast.training.protection.private_backup import PrivateBackup
from holdfast.training.protection.snapshot_schedule import SnapshotSchedule
from holdfast.training.protection.snapshot_writer import WrittenDuringCopy, copy_limit_s
from holdfast.training.protection.write_gate import WholeState, WriteGate
from holdfast.training.rank import Rank, print_warning

GATE_S = 0.8  # a just-in-time copy waits this long for the optimizer to finish its writes
LAST_PAUSE_S = 0.01  # the pause between two attempts to make the last copy when its slot is in use
_INSIDE = "inside the optimizer's writes"
_WORTHLESS = "the state was found to be bad, so it is not copied"


class UncheckedNumbers(Protocol):
    """Gives access to the last step's numbers, which may not have been checked yet; see `NumberCheck`."""

    def bad_before(self, step: int) -> StepNumbers | None: ...
    def report_unchecked(self, numbers: StepNumbers) -> None: ...


class LastCopies:
    """Copies one rank's state when a failure, bad gradients or the end of the script requires it."""

    def __init__(
        self,
        rank: Rank,
        device: Device,
        gate: WriteGate,
        committed: CommittedState,
        backup: PrivateBackup,
        snapshots: SnapshotSchedule,
        numbers: UncheckedNumbers,
    ) -> None:
        self._rank, self._device, self._gate = rank, device, gate
        self._committed, self._backup, self._snapshots = committed, backup, snapshots
        self._numbers = numbers
        self._copies = True  # False once the supervisor has found the state to be bad
        self._was_refused = False  # whether the answer to the last order was that the state was not copied
        self._tails_ended = 0

    def just_in_time(self, generation: int, is_restored: bool, copy: bool = True) -> SecureAnswer:
        """Freeze the rank before its next write. If `copy` is set, copy its state as well.

        This takes at most `GATE_S` plus the time of the copies. The gate stays frozen, because this
        generation has ended. A rank that is still restoring its state is frozen too, because its steps would
        overwrite the snapshot that the other ranks resume from. If there was no room for the copy, the call
        may be repeated.
        """
        if generation != self._rank.generation:
            return self._refusal(-1, f"this is generation {self._rank.generation}")
        if not is_restored:
            self._gate.freeze(GATE_S)
            return self._refusal(-1, "its state is still being restored")
        if not copy:
            self._copies = False
            self._gate.freeze(GATE_S)
            return self._refusal(self._committed.step, _WORTHLESS)
        # Of the `COPIES` periods by which the launcher extends its wait, the last one is for the copy itself.
        limit_s = GATE_S + (progress.COPIES - 1) * self._snapshots.copy_s
        give_up_at = time.monotonic() + limit_s
        try:
            if not self._gate.freeze(limit_s):
                self._was_refused = True
                return self._refusal(self._committed.step, _INSIDE)
            tails_ended = self._tails_ended
            answer = self._copy_whole(give_up_at)
            self._was_refused = not answer.whole
            if self._was_refused and self._tails_ended != tails_ended:  # the tail has ended in the meantime
                answer = self._copy_whole(give_up_at)
            return answer
        finally:
            self._backup.receive_resent()

    def at_end_of_tail(self) -> None:
        """Make the copy that was refused during the tail that now ends, if the script has restored the state.

        For example, an evaluation may use other weights for a while. The supervisor waits until the tail has
        ended, so the copy has to come first.
        """
        self._tails_ended += 1  # before the check, so that one of the two threads makes the copy
        if self._was_refused and self._copies:
            give_up_at = time.monotonic() + self._wait_s
            self._was_refused = not self._copy_whole(give_up_at, is_tail_over=True).whole

    def before_write(self) -> None:
        """Copy the state while it is whole, because the optimizer is about to write bad numbers into it."""
        self._copy_whole(0.0)

    def before_exit(self) -> SecureAnswer | None:
        """When an exception ends the main thread, copy the state if it is whole and not bad.

        Returns the answer to the order "secure", which the rank may get too late. Returns None if the state
        is bad, or if the answer was given: the group may already resume from a snapshot that a copy would
        overwrite. In a tail it does not, because the supervisor waits until the tail has ended.

        If the state is not copied, the rank's output gives the reason. A lack of room is not mentioned,
        because another rank of the member may be copying the same state.
        """
        if not self._copies or (self._was_refused and not self._committed.in_tail):
            return None
        answer = self._copy_whole(time.monotonic() + self._wait_s)
        if not answer.whole and (answer.why != NO_ROOM or self._rank.launch.nproc == 1):
            print_warning(f"rank {answer.rank}: its state of step {answer.step} was not copied: {answer.why}")
        return answer

    @property
    def _wait_s(self) -> float:
        """How long the main thread waits for the device to complete the writes that are queued."""
        return GATE_S if self._device.queues else 0.0

    def _refusal(self, step: int, why: str) -> SecureAnswer:
        return SecureAnswer(self._rank.number, step, False, why)

    def _copy_whole(self, give_up_at: float, *, is_tail_over: bool = False) -> SecureAnswer:
        """Copy the state that is whole on the device. If no state is whole, wait for one until `give_up_at`.

        If the copy fails, the answer gives the reason. With `is_tail_over`, the script changes nothing more
        before its next step.
        """
        try:
            while (whole := self._gate.wait_for_whole_state(give_up_at - time.monotonic())) is not None:
                if (bad := self._numbers.bad_before(whole.step)) is not None:
                    self._numbers.report_unchecked(bad)
                    return self._refusal(whole.step, bad.spoilt())
                try:
                    return self._copy(whole, is_tail_over)
                except WrittenDuringCopy:
                    if time.monotonic() > give_up_at:
                        break
        except (OSError, BadInput, Broken) as error:
            return self._refusal(self._committed.step, str(error))
        return self._refusal(self._committed.step, _INSIDE)

    def _copy(self, whole: WholeState, is_tail_over: bool) -> SecureAnswer:
        number, step, committed, snapshots = self._rank.number, whole.step, self._committed, self._snapshots
        with snapshots.copying:
            snapshots.end_transfer()
            if snapshots.held(step):
                return SecureAnswer(number, step, True, "already held")
            # If the host's part was kept, it has already been compared with the footprint.
            since = committed.footprint if whole.part is None else None
            if since is not None and since.step != step:
                return self._refusal(step, "between two steps")
            if step == snapshots.voided:
                return self._refusal(step, "changed after its commit")
            if since is not None and snapshots.defers and committed.in_tail and not is_tail_over:
                return self._refusal(step, "during work after a commit, which may change the state")
            if since is not None and (what := committed.changed(since)) is not None:
                return self._refusal(step, what)
            cost_s = snapshots.writer.write_just_in_time(
                self._rank.generation,
                step,
                whole.part,
                lambda: (
                    self._gate.is_still_whole(whole) and (since is None or committed.changed(since) is None)
                ),
            )
            if cost_s is None and not snapshots.held(step):
                return self._refusal(step, NO_ROOM)
        return SecureAnswer(number, step, True)

    def at_end(self, step: int) -> str:
        """Ensure that a snapshot of `step`, the last step, exists. Return "", or the reason why none exists.

        Another rank of the member may be writing the same snapshot, before a pause or at the end of its loop.
        A checkpoint in progress may also be reading the slot that is to be written next. This waits for both,
        but no longer than a copy may take. A reader that has not finished by then keeps its slot, and the
        newer snapshot is overwritten instead.
        """
        snapshots = self._snapshots
        give_up_at = time.monotonic() + copy_limit_s(snapshots.writer.expected_bytes())
        while not snapshots.held(step):
            if self._gate.frozen:
                return "the generation has ended"
            late = time.monotonic() > give_up_at
            failed = snapshots.copy(step, over_newer=late)
            if failed or (late and not snapshots.held(step)):
                return failed or "all snapshot slots were in use"
            time.sleep(LAST_PAUSE_S)
        return ""
