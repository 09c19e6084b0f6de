"""Define what happens to protected state in one training step, and in which order.

Read `TrainingStep` from top to bottom: its methods are in the order of their calls in a step, and
each of them is a list of actions. `Protection` and `WriteGate` do the work; this module defines the order.

| moment         | actions, in this order                                                                  |
|----------------|-----------------------------------------------------------------------------------------|
| `begin`        | the loop is about to yield the step                                                     |
| `forward`,     | advance a snapshot that is being copied in pieces; send private state early if it is    |
| `backward`     | already final                                                                           |
| `before_write` | store and send the private state of the step being made; check the gradients, and copy  |
|                | the state if they are bad; begin the writes at the gate                                 |
| (the optimizer)| the optimizer writes; from now until the commit, no state is whole                      |
| `after_write`  | mark the end of the writes in the device's queue                                        |
| `commit`       | check the numbers; check the private state; count and show the step; record its         |
|                | footprint; end the writes at the gate; take a snapshot if one is due                    |
| `end_tail`     | the script's work after the commit has ended; detect the changes that it made           |

This order is crash-consistent: if a process is killed between any two of these actions, either the state of a
committed step is whole in memory, or the rank reports that it is between two steps and another rank provides
the state.

- *Private state before replicated state.* Other ranks have the same replicated state, but no other rank has
  this rank's private state. So the private state of step n + 1 is in two places before the optimizer writes
  the first byte of that step's replicated state. If the replicated state of a step exists on any rank, its
  private states therefore exist too.
- *The gate comes last, just before the write.* A copy is made only while the gate knows the step whose state
  is whole. A rank reaches the gate only after everything else that must precede the write. So if a rank is
  frozen at the gate (`WriteGate.begin_writes` then never returns), its state of step n is whole and its
  private state is stored. On a host, the write counter in the progress page is odd from then until the
  commit. The page of a dead rank therefore shows whether its memory was between two steps.
- *Bad numbers before the count.* A step whose numbers are bad is reported and never counted, so no snapshot
  or checkpoint of it can exist. On a device, the numbers of a step may be checked one commit later. Until
  then, a just-in-time copy checks them first (`NumberCheck.bad_before`).
- *The footprint before the end of the writes.* A copy that is made after the commit compares the state with
  the footprint of that commit. If a thread finds that the writes of a step have ended, it therefore also
  finds the footprint of that step.
- *The snapshot after the end of the writes.* By then the state is whole. It is copied into the slot that does
  not hold the newest snapshot, so a fault during the copy costs only that copy.
- *The tail before the next step.* The script may write protected state after a commit. Such changes are
  detected before the next step begins. The snapshot of the commit is then replaced, taken late, or made void.

On a GPU, the device's queue orders all of these actions (see `holdfast.training.protection.write_gate`). The
host runs up to one step ahead. It does not wait for the kernels of the step that it commits, and checks the
numbers of that step when it commits the next one.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.errors import Uncommitted
from holdfast.protocol.progress import Phase
from holdfast.state.device import Device
from holdfast.state.gradients import StepNumbers
from holdfast.state.module_flags import ModuleFlags
from holdfast.training.caught_errors import CaughtErrorCheck
from holdfast.training.misuse.call_order import CallOrder
from holdfast.training.misuse.script_checks import ScriptChecks
from holdfast.training.number_check import NumberCheck
from holdfast.training.protection.rank_protection import Protection
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank


class TrainingStep:
    """One rank's current step. As a `torch_hooks.StepObserver`, it is called by torch's hooks.

    Without a launcher, there is no protection and no progress page. The order of calls and the numbers are
    still checked, but no state is saved.
    """

    def __init__(
        self,
        rank: Rank,
        device: Device,
        gate: WriteGate,
        flags: ModuleFlags,
        numbers: NumberCheck,
        checks: ScriptChecks,
        protection: Protection | None,
    ) -> None:
        self.protection, self.order = protection, CallOrder()
        self.done = 0  # the number of steps that the state contains
        self.goal = 0  # the number of steps at the end of the current loop; 0 before the first loop
        self.has_consulted = False  # the script may have read `step`, so its work may depend on that number
        self.in_tail = False  # the script is between a commit and the next step
        self.in_pause = False  # the script is in a pause that did not begin during an optimizer's writes
        self._rank, self._page, self._device, self._gate = rank, rank.page, device, gate
        self._flags, self._numbers, self._checks = flags, numbers, checks
        self._caught: CaughtErrorCheck | None = None
        self._prepared = -1  # the step whose private state has been stored
        self._host_is_ahead = False  # work of the previous step may still be in the device's queue

    def watch_errors(self) -> None:
        """From now on, refuse steps that lack a lost peer's contribution."""
        self._caught = CaughtErrorCheck(self._rank.peers, lambda: self._gate.frozen)

    @property
    def is_writing(self) -> bool:
        """True on the host from the moment a step's first optimizer is called until the step's commit."""
        return self._gate.writing

    # -- the loop yields a step

    def begin(self) -> None:
        """Begin the step with the number `done`, which the loop is about to yield."""
        self.order.begin(self.done)
        self.in_tail = False
        self.show_phase(Phase.DATA)
        if self.protection is not None:
            self.protection.backup.begin_step()
        self._rank.drill.hang()

    # -- forward and backward passes

    def forward(self) -> None:
        """Record that a module is about to be called, and advance a snapshot in progress."""
        self.show_phase(Phase.FORWARD)
        if self.in_pause:
            if self.protection is not None:
                self.protection.changes.forward_in_pause()
        elif self._device.queues and self.protection is not None:
            self.protection.snapshots.advance()

    def should_poison(self) -> bool:
        """Return True if the completed forward pass must produce a bad gradient, for a drill."""
        return self._numbers.poison_step is not None

    def poisoned(self) -> None:
        """Record that the completed forward pass will produce a bad gradient, for a drill."""
        self._numbers.is_poisoned = True

    def backward(self) -> None:
        """Record that a differentiable forward pass has ended.

        This sends private state early if that state is final, and advances a snapshot in progress.
        """
        self.show_phase(Phase.BACKWARD)
        self.has_consulted = True
        if self.protection is not None:
            self.protection.backup.after_forward(self.done + 1)
            if self._device.queues:
                self.protection.snapshots.advance()

    # -- the optimizer writes

    def before_write(self) -> None:
        """Prepare for an optimizer's writes, and pass the gate before the first write of a step.

        Raises:
            BadInput: the step has already been committed.
            PeerLost: the gradients lack a lost peer's contribution.
        """
        self.has_consulted = True
        if self._caught is not None:
            self._caught.writes(self.done)
        if self.is_writing:
            self._write_more()
            return
        self.order.write()
        self._secure_private_state()
        if self._numbers.probe_gradients() and self.protection is not None:
            self.protection.last_copies.before_write()  # so that only the bad step is lost
        self._begin_writes()
        if self._page is not None and not self._device.queues:  # the host cannot see when a device writes
            self._page.writing(True)
        self.show_phase(Phase.OPTIMIZER)

    def _write_more(self) -> None:
        """Prepare for another optimizer in the same step, which may write in another stream of the device."""
        if self._page is not None:
            self._page.writes_more()
        if self._device.queues:
            if self.protection is not None:
                self.protection.snapshots.delay_writes()
            self._gate.begin_more_writes()

    def after_write(self, *_: Any) -> None:
        """Mark the end of an optimizer's writes in its stream. The commit may be in another stream.

        On a CPU, the writes are complete at this point, and the rest of the step does not wait for other
        ranks.
        """
        if self._device.queues:
            self._gate.end_some_writes()
        elif self._page is not None:
            self._page.written()

    # -- the commit

    def commit(self, loss: Any, norm: Any, samples: int, tokens: int, flops: float, position: int) -> None:
        """Count the step: the state now contains `done + 1` steps. See `State.commit` for the arguments."""
        self._refuse_without_peers()
        self._warn_of_misuse()
        numbers = self._numbers.receive(self.done, loss, norm, position)
        if not self.is_writing:
            self._pass_through_gate()
        self._check_private_state()
        self._count()
        self._show_commit(numbers, samples, tokens, flops, position)
        self._record_footprint()
        self._gate.end_writes()
        self._rank.report_first_step()
        self._take_due_snapshot()
        self._begin_tail()

    def _refuse_without_peers(self) -> None:
        if self._caught is not None:
            self._caught.commits(self.done, written=self.is_writing)

    def _warn_of_misuse(self) -> None:
        if self._checks.warn_of_unprotected() and self.protection is not None:
            self.protection.changes.silence()
        self._checks.check(self.done)

    def _pass_through_gate(self) -> None:
        """Pass the gate in a step without writes, for example because a scaler skipped it."""
        if self._prepared <= self.done:
            self._secure_private_state(skipped=True)
        self._begin_writes()
        self._checks.watch_gradients()

    def _check_private_state(self) -> None:
        """Send private state again if it has changed since it was sent, as part of this commit."""
        if self.protection is not None:
            if self._flags.commit():  # frozen and trained parameters are watched separately
                self.protection.committed.search_parameters()
            self._checks.check_threads()
            self.protection.backup.check(self.done + 1)

    def _count(self) -> None:
        self.done += 1
        self.order.committed()
        if self._caught is not None:
            self._caught.committed()

    def _show_commit(
        self, numbers: StepNumbers, samples: int, tokens: int, flops: float, position: int
    ) -> None:
        """Write the step to the progress page, with the numbers that were checked last."""
        if self._page is None:
            return
        judged = self._numbers.judged
        shown = numbers if judged is None else judged
        norm = math.nan if shown.norm is None or not math.isfinite(shown.norm) else shown.norm
        # A kernel launch may block on a full queue until the previous step is complete.
        if self._host_is_ahead:
            self._page.disown()
        self.in_tail = True
        self._page.commit(self.done, shown.loss, norm, samples, tokens, flops, 0, position, Phase.TAIL)
        self._host_is_ahead = self._device.queues and not numbers.waited

    def _record_footprint(self) -> None:
        if self.protection is None:
            return
        if self.done == self.goal:  # the last checkpoint needs a copy of this step, and no later commit helps
            self.protection.committed.search_parameters()
        self.protection.committed.record(self.done)

    def _take_due_snapshot(self) -> None:
        if self.protection is not None:
            self.protection.after_commit(self.done)

    def _begin_tail(self) -> None:
        if self._page is not None:
            self._page.tail_begins()

    # -- after the commit

    def end_tail(self) -> None:
        """Detect what the script has changed in the tail that has just ended.

        Call this before anything else, because all further work starts from the changed state. No rank begins
        its next step before this call.
        """
        if self.protection is not None:
            self.protection.last_copies.at_end_of_tail()
        if self._page is not None:
            self._page.tail_is_over()
        if self.protection is not None:
            self.protection.changes.after_tail()

    # -- steps that differ

    def skip(self) -> None:
        """Skip a step whose batch is known to be bad. All ranks skip it, so their collectives still match.

        The order of actions is the same as in a step without an optimizer, except that private state is
        checked after the step is counted.
        """
        self._secure_private_state()
        self._begin_writes()
        self.done += 1
        if self._page is not None:
            self._page.skip(self.done)
        self._record_footprint()
        self._gate.end_writes()
        if self.protection is not None:
            self.protection.backup.check(self.done)
        self._take_due_snapshot()

    def refuse_uncommitted(self, step: int) -> None:
        """Raise `Uncommitted` if an optimizer has written in `step` but the script has not committed it."""
        if self._prepared > self.done and self.is_writing:
            raise Uncommitted(f"step {step} was not committed: call state.commit(loss=...) in the loop")

    def check_pending(self) -> None:
        """Check the last commit's numbers if they are unchecked. Called before a pause and after a loop."""
        self._numbers.check_pending(self.done)

    # -- actions shared by several of the above

    def _secure_private_state(self, *, skipped: bool = False) -> None:
        """Store the private state of the step being made, and send it to another member. Collective."""
        self._prepared = self.done + 1
        if self.protection is not None:
            self.protection.before_optimizer(self.done + 1, skipped=skipped)

    def _begin_writes(self) -> None:
        """Begin the step's writes at the gate. Never returns once the gate is frozen."""
        keep = None
        if self._device.queues and self.protection is not None:
            self.protection.snapshots.advance(must=True)
            keep = self.protection.snapshots.keep_host_part
        self._gate.begin_writes(self.done, keep)

    def show_phase(self, phase: Phase) -> None:
        """Write what the script is doing now to the progress page."""
        if self._page is not None:
            self._page.phase(phase)

    def show_pause(self, phase: Phase, label: str, limit_s: float) -> None:
        """Write the pause that the script is in, and its limit, to the progress page."""
        if self._page is not None:
            self._page.pause(phase, label, limit_s)

    def forked(self) -> None:
        """Stop protecting state in a process that the script forked, because it is not the rank."""
        self._page, self.protection, self._caught = None, None, None
        self._checks.forked()
