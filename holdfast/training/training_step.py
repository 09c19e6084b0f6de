"""What happens to protected state in one training step, in the order in which it happens.

Read `TrainingStep` from top to bottom: its methods follow one another as the moments of a step do, and each
is a list of actions. `Protection` and `WriteGate` do the work; the order is here and nowhere else.

| moment         | what is done, in this order                                                             |
|----------------|-----------------------------------------------------------------------------------------|
| `begin`        | the loop is about to yield the step                                                     |
| `forward`,     | a snapshot that is being taken in pieces advances; private state that is known to be    |
| `backward`     | final is sent early                                                                     |
| `before_write` | the private state of the step being made is stored and sent; the gradients are read,    |
|                | and the state is copied if they are bad; the gate closes                                |
| (the optimizer)| it writes: between this and the commit no state is whole                                |
| `after_write`  | the writes are marked in the device's queue                                             |
| `commit`       | the numbers are judged; private state is checked; the step is counted and shown; its    |
|                | footprint is recorded; the gate opens; a snapshot is taken when one is due              |
| `end_tail`     | the script's work after the commit is over: what it changed belongs to the state        |

Why this order is crash consistent. A process can be killed between any two of these actions, and then either
the state of a committed step is whole in memory, or the rank says that it is in between, and another replica
answers.

- *Private state before replicated state.* Other ranks hold the same replicated state, but no other rank has
  this rank's private state. So the private state of step n + 1 has two homes before the first byte of the
  replicated state becomes that of step n + 1: the private state of each step whose replicated state exists on
  any rank exists as well.
- *The gate closes last before the write.* A copy is made only while the gate says which step's state is
  whole. The gate closes when everything else is done that the step needs, so a rank that is frozen there
  (`WriteGate.close` does not return then) has the state of step n whole and its private state stored. On a
  host the page's write counter is odd from then until the commit: the page of a dead rank shows that its
  memory is between two steps.
- *Bad numbers before the count.* A step whose numbers are bad is reported and never counted: no snapshot and
  no checkpoint of it can exist. On a device its numbers may be judged one commit later; then a just-in-time
  copy asks for them (`NumberCheck.bad_before`).
- *The footprint before the gate opens.* A copy that is made later than the commit compares the state with
  the footprint of that commit. A thread that finds the gate open finds the footprint of the same step.
- *The snapshot after the gate has opened.* It is a copy of a whole state like any other, into the slot that
  does not hold the newest snapshot. A fault in the midst of it costs that copy and nothing else.
- *The tail before the next step.* The script may write protected state after a commit. That is found before
  the next step begins, and the snapshot of the commit is amended, copied then, or made void.

On a GPU all of this is in the device's queue (`holdfast.training.protection.write_gate`): the host is up to a
step ahead, waits for no kernel of the step that it commits, and judges that step's numbers when it commits
the next one.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.errors import Uncommitted
from holdfast.protocol.progress import Phase
from holdfast.state import misuse
from holdfast.state.device import Device
from holdfast.state.gradients import StepNumbers
from holdfast.state.module_flags import ModuleFlags
from holdfast.training.caught_errors import CaughtErrorCheck
from holdfast.training.number_check import NumberCheck
from holdfast.training.protection.rank_protection import Protection
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank
from holdfast.training.script_checks import ScriptChecks


class TrainingStep:
    """One rank's present step. Receives torch's hooks, as a `torch_hooks.StepObserver`.

    Without a launcher there is no protection and no page: the order of calls and the numbers are checked, and
    nothing is kept.
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
        self.protection, self.order = protection, misuse.CallOrder()
        self.done = 0  # steps that the state contains
        self.has_consulted = False  # the script may know how far the state is: what it does may depend on it
        self.in_tail = False  # between a commit and the next step
        self.in_pause = False  # and no step is being written
        self._rank, self._page, self._device, self._gate = rank, rank.page, device, gate
        self._flags, self._numbers, self._checks = flags, numbers, checks
        self._caught: CaughtErrorCheck | None = None
        self._prepared = -1  # the step whose private state has been stored
        self._host_is_ahead = False  # work of the step before may still be in the device's queue

    def watch_errors(self) -> None:
        """Check from now on that no step lacks the part of a lost peer."""
        self._caught = CaughtErrorCheck(self._rank.peers, lambda: self._gate.frozen)

    @property
    def is_writing(self) -> bool:
        """True from the optimizer's first write of a step to its commit, as the host calls them."""
        return self._gate.writing

    # -- the loop yields a step

    def begin(self) -> None:
        """The loop is about to yield step `done`."""
        self.order.begin(self.done)
        self.in_tail = False
        self.show_phase(Phase.DATA)
        if self.protection is not None:
            self.protection.backup.begin_step()
        self._rank.drill_point()

    # -- forward and backward passes

    def forward(self) -> None:
        """A module is about to be called."""
        self.show_phase(Phase.FORWARD)
        if self.in_pause:
            if self.protection is not None:
                self.protection.changes.forward_in_pause()
        elif self._device.queues and self.protection is not None:
            self.protection.snapshots.advance()

    def should_poison(self) -> bool:
        """Say whether the forward pass that is over shall end in a bad gradient, for a drill."""
        return self._numbers.poison_step is not None

    def poisoned(self) -> None:
        """The forward pass that is over ends in a bad gradient."""
        self._numbers.is_poisoned = True

    def backward(self) -> None:
        """A forward pass that can be differentiated is over."""
        self.show_phase(Phase.BACKWARD)
        self.has_consulted = True
        if self.protection is not None:
            self.protection.backup.after_forward(self.done + 1)
            if self._device.queues:
                self.protection.snapshots.advance()

    # -- the optimizer writes

    def before_write(self) -> None:
        """An optimizer is about to write. Its first write of a step ends the state of the step before.

        Raises:
            BadInput: the step was committed already.
            PeerLost: its gradients lack the part of a lost peer.
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
            self.protection.last_copies.before_write()  # so a bad step costs nothing but itself
        self._close_gate()
        if self._page is not None and not self._device.queues:  # else the host does not know
            self._page.writing(True)
        self.show_phase(Phase.OPTIMIZER)

    def _write_more(self) -> None:
        """Another optimizer of the same step is about to write, perhaps in another stream of the device."""
        if self._page is not None:
            self._page.writes_more()
        if self._device.queues:
            if self.protection is not None:
                self.protection.snapshots.delay_writes()
            self._gate.before_more()

    def after_write(self, *_: Any) -> None:
        """An optimizer's writes are queued; its stream may be another one than that of the commit.

        On a host they are done. What the script waits for after that on a device is not its own work.
        """
        if self._device.queues:
            self._gate.after_some()
        elif self._page is not None:
            self._page.written()

    # -- the commit

    def commit(self, loss: Any, norm: Any, samples: int, tokens: int, flops: float, position: int) -> None:
        """Make the state that of `done + 1` steps; see `State.commit` for arguments and exceptions."""
        self._refuse_without_peers()
        self._warn_of_misuse()
        numbers = self._numbers.take(self.done, loss, norm, position)
        if not self.is_writing:
            self._pass_through_gate()
        self._check_private_state()
        self._count()
        self._show_commit(numbers, samples, tokens, flops, position)
        self._record_footprint()
        self._gate.open()
        self._rank.report_first_step()
        self._take_due_snapshot()
        self._begin_tail()

    def _refuse_without_peers(self) -> None:
        if self._caught is not None:
            self._caught.commits(self.done, written=self.is_writing)

    def _warn_of_misuse(self) -> None:
        if self._checks.warn_of_unprotected() and self.protection is not None:
            self.protection.changes.silence()
        self._checks.look(self.done)

    def _pass_through_gate(self) -> None:
        """Close the gate for a step without an optimizer, or one that a gradient scaler left out."""
        if self._prepared <= self.done:
            self._secure_private_state(skipped=True)
        self._close_gate()
        self._checks.watch_gradients()

    def _check_private_state(self) -> None:
        """Send private state again that has changed since it was sent: the step is counted with it."""
        if self.protection is not None:
            self._flags.commit()
            self._checks.look_at_threads()
            self.protection.backup.check(self.done + 1)

    def _count(self) -> None:
        self.done += 1
        self.order.committed()
        if self._caught is not None:
            self._caught.committed()

    def _show_commit(
        self, numbers: StepNumbers, samples: int, tokens: int, flops: float, position: int
    ) -> None:
        """Show the step on the page, with the numbers that were judged last."""
        if self._page is None:
            return
        judged = self._numbers.judged
        shown = numbers if judged is None else judged
        norm = math.nan if shown.norm is None or not math.isfinite(shown.norm) else shown.norm
        if self._host_is_ahead:  # a launch may find the queue full, and wait for the step before
            self._page.disown()
        self.in_tail = True
        self._page.commit(self.done, shown.loss, norm, samples, tokens, flops, 0, position, Phase.TAIL)
        self._host_is_ahead = self._device.queues and not numbers.waited

    def _record_footprint(self) -> None:
        if self.protection is not None:
            self.protection.committed.record(self.done)

    def _take_due_snapshot(self) -> None:
        if self.protection is not None:
            self.protection.after_commit(self.done)

    def _begin_tail(self) -> None:
        if self._page is not None:
            self._page.tail_begins()

    # -- after the commit

    def end_tail(self) -> None:
        """The script's work after a commit is over: find what it has changed before anything else is done.

        What follows begins from the state as it then is, and no rank begins its next step before that.
        """
        if self._page is not None:
            self._page.tail_is_over()
        if self.protection is not None:
            self.protection.changes.after_tail()

    # -- steps that differ

    def skip(self) -> None:
        """Pass over a batch that the supervisor named: all ranks do, so the collectives still meet.

        In the order of a step without an optimizer, except that private state is checked after the count.
        """
        self._secure_private_state()
        self._close_gate()
        self.done += 1
        if self._page is not None:
            self._page.skip(self.done)
        self._record_footprint()
        self._gate.open()
        if self.protection is not None:
            self.protection.backup.check(self.done)
        self._take_due_snapshot()

    def refuse_uncommitted(self, step: int) -> None:
        """Raise `Uncommitted` if the optimizer has written `step` and it was not committed."""
        if self._prepared > self.done and self.is_writing:
            raise Uncommitted(f"step {step} was not committed: call state.commit(loss=...) in the loop")

    def settle(self) -> None:
        """Judge the numbers of the last commit, if they have not been, before anything but a step follows."""
        self._numbers.settle(self.done)

    # -- actions of more than one moment

    def _secure_private_state(self, *, skipped: bool = False) -> None:
        """Store the private state of the step being made and give it to another member. Collective."""
        self._prepared = self.done + 1
        if self.protection is not None:
            self.protection.before_optimizer(self.done + 1, skipped=skipped)

    def _close_gate(self) -> None:
        """Close the gate. Never returns once it is frozen."""
        keep = None
        if self._device.queues and self.protection is not None:
            self.protection.snapshots.advance(must=True)
            keep = self.protection.snapshots.keep_host_part
        self._gate.close(self.done, keep)

    def show_phase(self, phase: Phase) -> None:
        """Show on the page what the script does now."""
        if self._page is not None:
            self._page.phase(phase)

    def show_pause(self, phase: Phase, label: str, limit_s: float) -> None:
        """Show on the page that the script pauses, and for how long it may."""
        if self._page is not None:
            self._page.pause(phase, label, limit_s)

    def forked(self) -> None:
        """This process is one that the script forked: what is done to its copies is kept nowhere."""
        self._page, self.protection, self._caught = None, None, None
        self._checks.forked()
