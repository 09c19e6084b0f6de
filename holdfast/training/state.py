"""Define `State`, the protected state that `session.protect` returns, with the loop over its steps.

A script calls `State.steps`, `State.commit` and `State.pause`. `holdfast.training.training_step` defines what
happens in a step and in which order, and explains why this order is crash-consistent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from holdfast.protocol.progress import Phase, pause_phase
from holdfast.state import advice, capture, device, torch_hooks
from holdfast.state.loss_guard import LossGuard
from holdfast.state.module_flags import ModuleFlags
from holdfast.state.private_state import PrivateState
from holdfast.training.misuse import arguments
from holdfast.training.misuse.loop_history import LoopHistory, SourceLine, line_of_script
from holdfast.training.misuse.script_checks import ScriptChecks
from holdfast.training.number_check import NumberCheck
from holdfast.training.pause import Pause
from holdfast.training.protection.rank_protection import Protection
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank, print_warning
from holdfast.training.training_step import TrainingStep
from holdfast.worker import pauses

_COMMIT = "commit(loss, grad_norm=..., samples=..., tokens=..., flops=..., position=...)"
_PAUSE = 'pause("eval", limit_s=600)'
# A pause that has exceeded its limit gets this limit, because 0 would mean the run's limit.
_MIN_LIMIT_S = 1e-3


class State:
    """The protected state of a script. `step` is the number of steps that it contains."""

    def __init__(self, rank: Rank, objects: Mapping[str, Any]) -> None:
        """Classify `objects` and attach hooks to them. `_begin` restores them later."""
        self._rank, self._objects = rank, objects
        modules, private, self._replicated = torch_hooks.classify(objects)
        self._flags = ModuleFlags(modules)
        self._warn_of_shared_generators()
        guard = LossGuard(factor=rank.launch.loss_jump) if rank.launch.loss_jump > 0 else None
        self._private = PrivateState(modules, private, rank.device, guard, self._custom_schedulers())
        self._device = rank.accelerator or device.device_of(modules.values())
        self._gate = WriteGate(self._device)
        self._optimizers = [each for each in self._replicated.values() if torch_hooks.is_optimizer(each)]
        self._numbers = NumberCheck(
            rank, tuple(modules.values()), self._optimizers, self._device, self._gate, guard
        )
        self._checks = ScriptChecks(rank, modules.values(), self._optimizers, self._device)
        self._training = TrainingStep(
            rank, self._device, self._gate, self._flags, self._numbers, self._checks, self._protect()
        )
        torch_hooks.attach_hooks(modules, self._optimizers, self._training, self._training.after_write)
        self._turn = 0  # incremented each time a loop yields a step, and when a loop ends
        self._random: Mapping[str, bytes] | None = None  # restored random states, to be set by the first loop
        # The label, limit and start of each open pause, outermost first.
        self._pauses: list[tuple[str, float, float]] = []
        self._warned_pauses: set[str] = set()  # the warnings of unused pauses that were printed
        self._has_begun = False  # a loop over the steps has begun
        self._loops: LoopHistory

    def _warn_of_shared_generators(self) -> None:
        if self._rank.world_size > 1:
            for name in torch_hooks.shared_with_generators(self._replicated):
                self._rank.warn(advice.shared_generator(name))

    def _custom_schedulers(self) -> dict[str, Any]:
        """Return the schedulers whose classes are not torch's. Earlier versions treated them as private."""
        return {
            name: each
            for name, each in self._replicated.items()
            if torch_hooks.is_custom_scheduler(each, self._objects)
        }

    def _protect(self) -> Protection | None:
        """Return this rank's protection; None without a launcher, because there is no memory volume."""
        channel = self._rank.channel
        if channel is None:
            return None
        return Protection(
            self._rank,
            self._replicated,
            self._private,
            self._flags,
            self._gate,
            self._device,
            channel.arena_path,
            self._numbers,
        )

    def _begin(self) -> None:
        """Restore the group's resume point, if any, into the objects. Call this once, before the first step.

        Raises:
            BadInput: an object cannot be protected, or the state is from a different model.
        """
        rank, protection = self._rank, self._protection
        if protection is not None:
            self._training.watch_errors()
            capture.refuse_dtypes(self._replicated)
            self._training.done, self._random = protection.restore()
            protection.committed.record(self._training.done)
            rank.restored()
        self._loops = LoopHistory(self._training.done, rank.warn)
        self._checks.begin(self._objects)
        self._gate.start(self._training.done)
        self._training.has_consulted = False

    @property
    def step(self) -> int:
        """The number of steps that the state contains."""
        self._training.has_consulted = True
        return self._training.done

    @step.setter
    def step(self, value: int) -> None:
        self._training.done = value

    @property
    def _protection(self) -> Protection | None:
        """This rank's protection; None without a launcher, and in a process that the script forked."""
        return self._training.protection

    # -- the loop

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, from where the group left off up to `count` - 1.

        `count` is the number of steps in the whole training, counted from its beginning, not in an epoch.

        A step counts only after it is committed. If the script leaves a step with `continue` or `break`
        without committing it, the step is yielded again, up to three times in total.

        Raises:
            BadInput: `count` is not a whole number or is negative; the loop is inside another loop; or the
                loop at this line has already trained all `count` steps, which means that `count` is probably
                the length of an epoch.
            Uncommitted: a step began too often without a commit, or its optimizer ran and it was not
                committed.
        """
        return self._steps(count, line_of_script())

    def _steps(self, count: int, line: SourceLine) -> Iterator[int]:
        count, training = arguments.step_count(count), self._training
        training.order.enter()
        begun = training.done
        try:
            self._loops.begin(count, begun, line)
            yield from self._loop(count)
        finally:
            self._loops.ended(training.done - begun, line)
            training.order.leave()

    def _loop(self, count: int) -> Iterator[int]:
        training = self._training
        self._begin_loop(count)
        training.show_phase(Phase.DATA)
        try:
            while training.done < count:
                training.end_tail()
                if training.done in self._rank.skip:
                    training.skip()
                    continue
                step = training.done
                training.begin()
                self._turn += 1
                yield step
                training.refuse_uncommitted(step)
            training.check_pending()
            training.end_tail()
        finally:  # this also runs after a `break`, because the code after the loop is not part of a step
            self._turn += 1
            training.show_phase(Phase.IDLE)
        if self._protection is not None:
            self._protection.after_loop(training.done)

    def _begin_loop(self, count: int) -> None:
        """Restore the flags and random states at the start of a loop, and secure the state."""
        training, protection = self._training, self._protection
        has_consulted = training.has_consulted  # must be read before the calls below
        if protection is not None and training.done <= count:
            # For a loop that is already complete, this must not happen yet, because the script may set flags
            # after it.
            self._restore_flags()
        if self._random is not None:
            self._private.restore_random(self._random)
            self._random = None
            if self._rank.start.is_shared:
                self._private.reseed_random("joined", self._rank.generation, self._rank.number)
        is_adapted = not self._has_begun and self._adapt()
        self._has_begun = True
        self._rank.aim(count)
        training.goal = count
        if protection is not None:
            protection.before_loop(
                training.done, has_consulted=has_consulted or is_adapted, is_adapted=is_adapted
            )

    def _adapt(self) -> bool:
        """Let the script adapt to another number of ranks; report whether it could. Return True if it has."""
        sizes, private = self._rank.sizes, self._private.own
        self._rank.report_resizing(sizes.fixed_by(private))
        return sizes.adapt(private)

    def _restore_flags(self) -> None:
        frozen = self._flags.begin()
        if frozen:
            self._rank.warn(advice.frozen_parameters(frozen, self._training.done))

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
        """Declare the step complete: the state now contains `step + 1` steps.

        `loss` and `grad_norm` may be tensors or numbers. This call checks that both are finite, and that the
        loss has not jumped. `position` is the index of the step's first sample, which identifies a bad batch.
        `samples`, `tokens` and `flops` are the totals of this step over all ranks.

        The call does not wait for tensors on a GPU. They are checked and displayed when the next step is
        committed. The call waits at most until the GPU has finished the previous step.

        Raises:
            BadInput: the call is outside of a step or is the second one in a step, an argument is not a
                number, or an argument is unknown.
            NumericFault: the numbers are bad, and no supervisor has rolled the group back. Under a supervisor
                the call does not return, because the rollback ends the process.
            PeerLost: the script caught an exception that a lost peer caused, so the step lacks an update.
        """
        if unnamed or unknown:
            arguments.require_names("commit(loss, grad_norm=..., samples=..., position=...)", unnamed)
            arguments.require_known(_COMMIT, unknown)
        self._training.order.commit()
        arguments.require_scalar("loss", loss)
        arguments.require_scalar("grad_norm", grad_norm)
        if not (type(samples) is type(tokens) is type(position) is int and type(flops) in (int, float)):
            arguments.require_counts(samples=samples, tokens=tokens, flops=flops, position=position)
        self._training.commit(loss, grad_norm, samples, tokens, flops, position)

    def pause(self, label: str = "pause", limit_s: float = 0.0, **unknown: NoReturn) -> Pause:
        """Declare work that is not a step, to keep it from counting as a hang.

        Use the result in a `with` statement, or as a decorator of a function. If a script does neither, this
        prints a warning, once for each line and on any rank.

        `label` is "eval", "checkpoint", or any other word. `limit_s` is the limit of this pause in seconds; 0
        means the run's `--pause-timeout` (30 minutes by default). Pauses may be nested. When the inner pause
        ends, the outer pause continues with the rest of its limit.

        When the pause ends, the random generators are reset to the states that they had when it began. The
        script may swap in other weights during the pause if it restores the original weights before the end.

        Raises:
            BadInput: the label, the limit or an argument is invalid (raised when the pause begins), or the
                pause decorates an `async def` or a generator function, which does its work after its call
                has returned.
        """
        return Pause(label, lambda: self._paused(label, limit_s, unknown), self._warn_of_unused_pause)

    def _warn_of_unused_pause(self, text: str) -> None:
        if text not in self._warned_pauses:
            self._warned_pauses.add(text)
            print_warning(text)  # on any rank, because a script may evaluate on one rank only

    @contextmanager
    def _paused(self, label: str, limit_s: float, unknown: Mapping[str, Any]) -> Iterator[None]:
        arguments.require_known(_PAUSE, unknown)
        arguments.check_pause(label, limit_s)
        self._training.check_pending()
        random = dict(self._private.random())
        self._pauses.append((label, float(limit_s), time.monotonic()))
        self._show_pause(label, limit_s)
        try:
            with self._unchanged_state(label):
                yield
        except BaseException as error:
            pauses.mark_left_pause(error, self._training.done)
            raise
        finally:
            self._private.restore_random(random)
            self._pauses.pop()
            self._show_outer_pause()

    def _show_pause(self, label: str, limit_s: float) -> None:
        self._training.show_pause(pause_phase(label), label, limit_s)

    def _show_outer_pause(self) -> None:
        """After a pause, show the enclosing pause with the rest of its limit, or else the loop."""
        if not self._pauses:
            self._training.show_phase(Phase.TAIL if self._training.in_tail else Phase.DATA)
            return
        label, limit_s, began_s = self._pauses[-1]
        rest_s = max(limit_s - (time.monotonic() - began_s), _MIN_LIMIT_S)
        self._show_pause(label, rest_s if limit_s else 0.0)

    @contextmanager
    def _unchanged_state(self, label: str) -> Iterator[None]:
        """Ensure that if a peer dies during the pause, swapped-in weights are not copied as the state."""
        training, protection = self._training, self._protection
        if protection is None or training.is_writing or training.in_pause:
            yield
            return
        training.in_pause = training.has_consulted = True
        protection.changes.before_pause(label, training.done)
        try:
            yield
            protection.changes.after_pause(label)
        finally:
            training.in_pause = False

    # -- for the session

    def _poison(self) -> None:
        """For a drill, make the next step's loss, gradients and parameters NaN, as a bad batch would."""
        self._numbers.poison(self._training.done)

    def _forked(self) -> None:
        """Stop protecting state in a process that the script forked, because it is not the rank."""
        self._training.forked()
