"""The protected state of a training script: where it is, what it did, and how it is kept.

The order of things within a step is what the guarantees rest on:

1. before the optimizer's first write, the rank's private state of the step being made is stored and given
   to another member; from then until `commit` the page's write counter is odd and the gate is closed;
2. the optimizer writes;
3. `commit` judges the numbers, opens the gate, counts the step, and takes a snapshot when one is due.

So at any instant either the state of a committed step is whole in memory, or the rank says that it is in
between (and another replica answers).

On a GPU all of this is in the device's queue (`holdfast.training.protection.write_gate`): the host is up to a
step ahead, waits for no kernel of the step that it commits, and judges that step's numbers when it commits
the next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.errors import NumericFault, Uncommitted
from holdfast.protocol.progress import FLAG_JUMP, FLAG_NONFINITE, Phase
from holdfast.state import capture, device, gradients, misuse, torch_hooks
from holdfast.state.gradients import GradientProbe, StepNumbers
from holdfast.state.loss_guard import LossGuard
from holdfast.state.module_flags import ModuleFlags
from holdfast.state.private_state import PrivateState
from holdfast.training.caught_errors import CaughtErrorCheck
from holdfast.training.loop_history import LoopHistory, SourceLine, line_of_script
from holdfast.training.protection.rank_protection import Protection
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank
from holdfast.worker import pauses
from holdfast.worker.thread_frames import BackgroundThreads

if TYPE_CHECKING:
    import torch


_COMMIT = "commit(loss, grad_norm=..., samples=..., tokens=..., flops=..., position=...)"
_PAUSE = 'pause("eval", limit_s=600)'
_PHASES = {"eval": Phase.EVAL, "checkpoint": Phase.CHECKPOINT}
_LEAST_LIMIT_S = 1e-3  # of a pause that has overrun its own: 0 would mean the run's


@dataclass(frozen=True, slots=True)
class _StepHooks:
    """What torch's hooks call, see `torch_hooks.StepObserver`; not among the methods that a script sees."""

    forward: Callable[[], None]
    backward: Callable[[], None]
    before_write: Callable[[], None]
    spoils: Callable[[], bool]


class State:
    """What `session.protect` returns. `step` is the number of steps that the state contains."""

    def __init__(self, rank: Rank, objects: Mapping[str, Any]) -> None:
        """Sort `objects` and hook them; `_begin` restores them."""
        self._rank = rank
        self._step = 0
        self._asked = False  # somebody has read `step` since `protect`: what follows may depend on it
        self._turn = 0  # another one with each step that a loop yields, and when a loop ends
        modules, private, replicated = torch_hooks.classify(objects)
        self._flags = ModuleFlags(modules)
        if rank.world_size > 1:
            for name in torch_hooks.shared_with_generators(replicated):
                misuse.warn(rank.number, misuse.shared_generator_advice(name))
        self._guard = LossGuard(factor=rank.launch.loss_jump) if rank.launch.loss_jump > 0 else None
        moved = {
            name: each for name, each in replicated.items() if torch_hooks.is_custom_scheduler(each, objects)
        }
        self._private = PrivateState(modules, private, rank.device, self._guard, moved)
        self._device = rank.accelerator or device.device_of(modules.values())
        self._gate = WriteGate(self._device)
        self._pausing = False
        self._pauses: list[tuple[str, float, float]] = []  # those within each other: label, limit, begin
        self._unused: set[str] = set()  # warnings of pauses that were no `with`
        self._prepared = -1  # the step whose private state has been stored
        self._random: Mapping[str, bytes] | None = None
        self._page = rank.page
        self._poison_step: int | None = None  # the step in which a drill asked for a bad number
        self._spoilt = False
        self._optimizers = [o for o in replicated.values() if torch_hooks.is_optimizer(o)]
        self._modules = tuple(modules.values())
        self._gradients = GradientProbe(self._optimizers, self._device)
        self._bad_gradient = False
        self._probe: torch.Tensor | None = None  # of this step's gradients, on the device
        self._unjudged: StepNumbers | None = None  # of the step before, which may not have arrived
        self._judged: StepNumbers | None = None  # the last
        self._scaled = False  # a GradScaler decides whether the optimizer writes
        self._in_tail = False  # between a commit and the next step
        self._ahead = False  # work of the step before may still be in the device's queue
        self._order = misuse.CallOrder()
        self._forgotten: misuse.UnprotectedTraining | None = misuse.UnprotectedTraining(
            modules.values(), self._optimizers, lambda text: misuse.warn(rank.number, text)
        )
        self._accumulated = misuse.AccumulatedGradients(
            modules.values(), self._device, lambda text: misuse.warn(rank.number, text)
        )
        self._protection: Protection | None = None
        if rank.channel is not None:
            arena = rank.channel.arena_path
            self._protection = Protection(
                rank,
                replicated,
                self._private,
                self._flags,
                self._gate,
                self._device,
                arena,
                self._why_spoilt,
            )
        hooks = _StepHooks(self._forward, self._backward, self._before_write, self._spoils)
        torch_hooks.attach_hooks(modules, self._optimizers, hooks, self._after_write)
        self._replicated, self._objects = replicated, objects
        self._caught: CaughtErrorCheck | None = None
        self._loops: LoopHistory
        self._added: misuse.AddedGroups
        self._unscheduled: misuse.UnprotectedSchedulers
        self._threads: BackgroundThreads

    def _begin(self) -> None:
        """Put the group's resume point into the objects, if there is one. Called once, before any step.

        Raises:
            BadInput: an object cannot be kept, or the state is of another model.
        """
        rank = self._rank
        if self._protection is not None:
            self._caught = CaughtErrorCheck(rank.peers, lambda: self._gate.frozen)
            capture.refuse_dtypes(self._replicated)
            self.step, self._random = self._protection.restore()
            self._protection.committed.record(self.step)
            rank.restored()
        self._loops = LoopHistory(self.step, lambda text: misuse.warn(rank.number, text))
        self._added = misuse.AddedGroups(
            self._modules, self._optimizers, lambda text: misuse.warn(rank.number, text)
        )
        self._unscheduled = misuse.UnprotectedSchedulers(
            self._optimizers, self._objects, lambda text: misuse.warn(rank.number, text)
        )
        # on any rank: one may save alone
        self._threads = BackgroundThreads(lambda text: misuse.warn(0, text))
        self._gate.start(self.step)
        self._asked = False

    @property
    def step(self) -> int:
        """The number of steps that the state contains."""
        self._asked = True
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value

    # -- the loop

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps to do, up to `count` in all, from where the group left off.

        `count` is that of the whole training, from its very beginning, and not that of an epoch.

        A step counts when it is committed; one left by `continue` or `break` without a commit is
        yielded again, at most three times.

        Raises:
            BadInput: `count` is no whole number, or below 0; the loop is within another one; a step was begun
                too often without a commit, or its optimizer ran and it was not committed; this line has
                trained all of its steps before, as an epoch's.
        """
        return self._steps(count, line_of_script())

    def _steps(self, count: int, line: SourceLine) -> Iterator[int]:
        count = misuse.step_count(count)
        self._order.enter()
        begun = self._step  # what the script has read of it, `_loop` looks at
        try:
            self._loops.begin(count, begun, line)
            yield from self._loop(count)
        finally:
            self._loops.ended(self._step - begun, line)
            self._order.leave()

    def _loop(self, count: int) -> Iterator[int]:
        asked = self._asked
        if self._protection is not None and self.step <= count:
            self._put_flags_back()  # not before an earlier loop, after which the script may set them
        if self._random is not None:
            self._private.restore_random(self._random)
            self._random = None
        self._rank.aim(count)
        if self._protection is not None:
            self._protection.before_loop(self.step, asked=asked)
        self._phase(Phase.DATA)
        try:
            while self.step < count:
                self._end_tail()
                if self.step in self._rank.skip:
                    self._skip_step()
                    continue
                step = self.step
                self._order.begin(step)
                self._in_tail = False
                self._phase(Phase.DATA)
                if self._protection is not None:
                    self._protection.backup.begin_step()
                self._rank.drill_point()
                self._turn += 1
                yield step
                if self._prepared > self.step and self._writing:
                    raise Uncommitted(
                        f"step {step} was not committed: call state.commit(loss=...) in the loop"
                    )
            self._settle()
            self._end_tail()
        finally:  # also when the script leaves the loop by `break`: what follows is no step
            self._turn += 1
            self._phase(Phase.IDLE)
        if self._protection is not None:
            self._protection.after_loop(self.step)

    def _put_flags_back(self) -> None:
        if left := self._flags.begin():
            misuse.warn(self._rank.number, misuse.frozen_advice(left, self.step))

    def _end_tail(self) -> None:
        """The script's work after a commit is over: see what it has changed before anything else is done.

        What follows begins from the state as it then is, and nobody sees a next step before that is settled.
        """
        if self._page is not None:
            self._page.tail_is_over()
        if self._protection is not None:
            self._protection.changes.after_tail()

    def commit(
        self,
        loss: Any = None,
        *unnamed: Any,
        grad_norm: Any = None,
        samples: int = 0,
        tokens: int = 0,
        flops: float = 0.0,
        position: int = -1,
        **unknown: NoReturn,
    ) -> None:
        """Declare the step done: the state is now that of `step + 1` steps.

        `loss` and `grad_norm` may be tensors or numbers and are judged here; `position` is the index of
        the step's first sample, to name a batch that fails. `samples`, `tokens` and `flops` are this
        step's, over all ranks.

        Tensors on a GPU are not waited for: they are judged, and shown, when the next step is committed.
        This call then waits for no more than the end of the step before.

        Raises:
            BadInput: outside of a step, or a second time in it; a number is none; an unknown argument.
            NumericFault: the numbers are bad and nobody supervises. Under a supervisor this call does not
                return then: the group is rolled back.
            PeerLost: the script has caught what a lost peer raised, and the step lacks its update.
        """
        misuse.require_names("commit(loss, grad_norm=..., samples=..., position=...)", unnamed)
        misuse.require_known(_COMMIT, unknown)
        self._order.commit()
        misuse.require_scalar("loss", loss)
        misuse.require_scalar("grad_norm", grad_norm)
        misuse.require_counts(samples=samples, tokens=tokens, flops=flops, position=position)
        if self._caught is not None:
            self._caught.commits(self.step, written=self._writing)
        self._settle_forgotten()
        self._added.look(self.step)
        self._unscheduled.look()
        self._accumulated.look()
        if self._spoilt or (self._poison_step is not None and self._poison_step < self.step):
            loss = math.nan
            if not self._spoilt:  # by a script whose forward passes are not seen
                torch_hooks.poison(self._optimizers)
        numbers = self._numbers(loss, grad_norm, position)
        if not self._writing:  # a step without an optimizer, or one that a gradient scaler left out
            self._prepare_once()
            self._close()
            self._accumulated.watch()
        if self._protection is not None:
            self._flags.commit()
            self._threads.look()
            self._protection.backup.check(self.step + 1)
        self.step += 1
        self._order.committed()
        if self._caught is not None:
            self._caught.committed()
        if self._page is not None:
            shown = numbers if self._judged is None else self._judged
            norm = math.nan if shown.norm is None or not math.isfinite(shown.norm) else shown.norm
            if self._ahead:  # a launch that finds the queue full waits for a collective of the step before
                self._page.disown()
            self._in_tail = True
            self._page.commit(self.step, shown.loss, norm, samples, tokens, flops, 0, position, Phase.TAIL)
            self._ahead = self._device.queues and not numbers.waited
        if self._protection is not None:
            self._protection.committed.record(self.step)
        self._gate.open()
        self._rank.report_first_step()
        if self._protection is not None:
            self._protection.after_commit(self.step)
        if self._page is not None:
            self._page.tail_begins()

    @property
    def _writing(self) -> bool:
        """True from the optimizer's first write of a step to its commit, as the host calls them."""
        return self._gate.writing

    def pause(self, label: str = "pause", limit_s: float = 0.0, **unknown: NoReturn) -> misuse.Pause:
        """Declare work that is no step ("eval", "checkpoint", or any word), so that it is no hang.

        `limit_s` is its own limit; 0 takes the run's (30 minutes unless told otherwise). Random generators
        are as before when it ends. Weights may be exchanged for others if they are put back before it ends.
        After one within another, that one goes on, with what is left of its limit. It is for `with`, or
        decorates a function; one that is neither is warned of on any rank, once for each line.

        Raises:
            BadInput: where it begins, for a wrong label, limit or argument; where it decorates an `async def`
                or a generator function, whose work is done later.
        """
        return misuse.Pause(label, lambda: self._paused(label, limit_s, unknown), self._pause_unused)

    def _pause_unused(self, text: str) -> None:
        if text not in self._unused:
            self._unused.add(text)
            misuse.warn(0, text)  # on any rank: one may evaluate alone

    @contextmanager
    def _paused(self, label: str, limit_s: float, unknown: Mapping[str, Any]) -> Iterator[None]:
        misuse.require_known(_PAUSE, unknown)
        misuse.check_pause(label, limit_s)
        self._settle()
        random = dict(self._private.random())
        self._pauses.append((label, float(limit_s), time.monotonic()))
        self._show_pause(label, limit_s)
        try:
            with self._kept_still(label):
                yield
        except BaseException as error:
            pauses.mark_left_pause(error, self.step)
            raise
        finally:
            self._private.restore_random(random)
            self._pauses.pop()
            if self._pauses:
                outer, limit_s, began_s = self._pauses[-1]
                left_s = max(limit_s - (time.monotonic() - began_s), _LEAST_LIMIT_S)
                self._show_pause(outer, left_s if limit_s else 0.0)
            else:
                self._phase(Phase.TAIL if self._in_tail else Phase.DATA)

    def _show_pause(self, label: str, limit_s: float) -> None:
        if self._page is not None:
            self._page.pause(_PHASES.get(label, Phase.PAUSED), label, limit_s)

    @contextmanager
    def _kept_still(self, label: str) -> Iterator[None]:
        """See that no peer's death finds weights that are swapped in for the pause as the state."""
        if self._protection is None or self._writing or self._pausing:
            yield
            return
        self._pausing = True
        self._protection.changes.before_pause(label, self.step)
        try:
            yield
            self._protection.changes.after_pause(label)
        finally:
            self._pausing = False

    # -- called by the hooks

    def _forward(self) -> None:
        self._phase(Phase.FORWARD)
        if self._pausing:
            if self._protection is not None:
                self._protection.changes.forward_in_pause()
        elif self._device.queues and self._protection is not None:
            self._protection.snapshots.advance()

    def _backward(self) -> None:
        self._phase(Phase.BACKWARD)
        if self._protection is not None:
            self._protection.backup.after_forward(self.step + 1)
            if self._device.queues:
                self._protection.snapshots.advance()

    def _spoils(self) -> bool:
        """Say whether the pass that has just been made shall end in a bad gradient."""
        self._spoilt = self._poison_step is not None
        return self._spoilt

    def _before_write(self) -> None:
        """The optimizer is about to write: secure what is private, close the gate."""
        if self._caught is not None:
            self._caught.writes(self.step)
        if self._writing:
            self._write_more()
            return
        self._order.write()
        self._prepare()
        self._secure_from_gradients()
        self._close()
        if self._page is not None and not self._device.queues:  # else the host does not know
            self._page.writing(True)
        self._phase(Phase.OPTIMIZER)

    def _write_more(self) -> None:
        """Another optimizer of the same step is about to write, perhaps in another stream of the device."""
        if self._page is not None:
            self._page.writes_more()
        if self._device.queues:
            if self._protection is not None:
                self._protection.snapshots.delay_writes()
            self._gate.before_more()

    def _after_write(self, *_: Any) -> None:
        """An optimizer's writes are queued; its stream may be another one than that of the commit.

        On a host they are done. What the script waits for after that on a device is no work of its own.
        """
        if self._device.queues:
            self._gate.after_some()
        elif self._page is not None:
            self._page.written()

    def _secure_from_gradients(self) -> None:
        """A step that is about to spoil the state costs nothing but itself: the state is copied before.

        Whether it did is known when it is over (`_judge`).
        Where a GradScaler leaves it to the optimizer's kernel to skip a step with bad gradients (fused
        optimizers do that), they are no fault: they are how the scaler finds its scale.
        """
        self._scaled = any(getattr(each, "found_inf", None) is not None for each in self._optimizers)
        if self._scaled:
            return
        if self._device.queues:
            self._probe = self._gradients.probe()
            return
        if self._gradients.finite():
            return
        self._bad_gradient = True
        if self._protection is not None:
            self._protection.last_copies.before_write()

    def _forked(self) -> None:
        """This process is one that the script forked: what is done to its copies is kept nowhere."""
        self._page, self._protection, self._forgotten, self._caught = None, None, None, None

    # -- for the listener

    def _why_spoilt(self, step: int) -> str:
        """Say which number, not judged yet, tells that the state of `step` is not good; "" if none does.

        Reported as well: it is not known whether the script will get to judge it.
        """
        numbers = self._unjudged
        if numbers is None or numbers.step >= step:
            return ""
        if why := numbers.spoilt():
            self._rank.report("nan", numbers.step, numbers.loss, numbers.position)
        return why

    def _poison(self) -> None:
        """For drills: make the next step a real NaN, as a bad batch does: loss, gradients, parameters."""
        self._poison_step = self.step

    # -- inside

    def _prepare(self, *, skipped: bool = False) -> None:
        self._prepared = self.step + 1
        if self._protection is not None:
            self._protection.before_optimizer(self.step + 1, skipped=skipped)

    def _prepare_once(self) -> None:
        if self._prepared <= self.step:
            self._prepare(skipped=True)

    def _settle_forgotten(self) -> None:
        """Warn of what is not protected before anything else: what else is noticed may come of it."""
        forgotten, self._forgotten = self._forgotten, None
        if forgotten is not None and forgotten.settle() and self._protection is not None:
            self._protection.changes.silence()

    def _close(self) -> None:
        keep = None
        if self._device.queues and self._protection is not None:
            self._protection.snapshots.advance(must=True)
            keep = self._protection.snapshots.keep_host_part
        self._gate.close(self.step, keep)

    def _skip_step(self) -> None:
        """Skip a batch that the supervisor named: all ranks do, so the collectives still meet."""
        self._prepare()
        self._close()
        self.step += 1
        if self._page is not None:
            self._page.skip(self.step)
        if self._protection is not None:
            self._protection.committed.record(self.step)
        self._gate.open()
        if self._protection is not None:
            self._protection.backup.check(self.step)
            self._protection.after_commit(self.step)

    def _numbers(self, loss: Any, norm: Any, position: int) -> StepNumbers:
        """Return the step's numbers, judged if they are here. Those of the step before have been.

        The gradients' norm is judged only if the optimizer used them: a GradScaler leaves out, by design, a
        step in which they overflowed.
        """
        if not self._writing or self._scaled:
            norm = None
        numbers = StepNumbers(self._device, self.step, loss, norm, self._probe, position)
        self._probe = None
        if self._device.queues:
            self._gate.keep_pace()
            self._settle()
        if numbers.late:
            self._unjudged = numbers
        else:
            self._judge(numbers)
        return numbers

    def _settle(self) -> None:
        """Judge what has not been judged, once it is here."""
        numbers = self._unjudged
        if numbers is not None:
            numbers.receive()
            self._judge(numbers)
            self._unjudged = None

    def _judge(self, numbers: StepNumbers) -> None:
        loss, norm, given = numbers.loss if numbers.has_loss else 0.0, numbers.norm, numbers.has_loss
        bad, self._bad_gradient = self._bad_gradient or not numbers.gradients_finite, False
        if (bad or (norm is not None and not math.isfinite(norm))) and not self._is_spoilt():
            norm, bad = None, False  # the optimizer left the step out, or had the gradients cleaned
        verdict = self._verdict(numbers.step, loss, norm, given)
        if verdict == "ok" and bad:
            verdict = "nan"
        self._judged = numbers
        if verdict == "ok":
            return
        why = self._guard.usual() if self._guard is not None and verdict == "jump" else ""
        if self._verdict(numbers.step, loss, None, given) == "ok":
            self._rank.yield_to_reporter()  # gradients are everybody's: whose loss it is says so first
        if self._page is not None:
            flags = FLAG_JUMP if verdict == "jump" else FLAG_NONFINITE
            shown = math.nan if norm is None else norm
            self._page.commit(self.step, loss, shown, 0, 0, 0.0, flags, numbers.position)
        self._rank.report_bad_number(verdict, numbers.step, loss, numbers.position, why)
        where = f"(batch position {numbers.position})"
        raise NumericFault(f"step {numbers.step}: loss {loss:g} is {_in_words(verdict)} {where}")

    def _is_spoilt(self) -> bool:
        """Say whether bad gradients have reached the state. Waits for all that is queued."""
        self._device.wait(self._device.mark())
        return gradients.state_is_spoilt(self._modules, self._optimizers)

    def _verdict(self, step: int, loss: float, norm: float | None, given: bool) -> str:
        if self._guard is not None and given:
            verdict = self._guard.check(loss, norm)
            accepted = self._rank.accepts(step, loss) if verdict == "jump" else ""
            if not accepted:
                return verdict
            self._rank.note(f"loss {loss:.6g} at step {step}; {self._guard.usual()}: {accepted}")
            self._guard.accept(loss)
            return "ok"
        for value in (loss, norm if norm is not None else 0.0):
            if not math.isfinite(value):
                return "nan" if math.isnan(value) else "inf"
        return "ok"

    def _phase(self, phase: Phase) -> None:
        if self._page is not None:
            self._page.phase(phase)


def _in_words(verdict: str) -> str:
    return {"nan": "not a number", "inf": "infinite", "jump": "far above the recent ones"}[verdict]
