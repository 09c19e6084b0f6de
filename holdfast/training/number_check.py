"""Judge the numbers of each step (loss, gradient norm, gradients), and report bad numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import NumericFault
from holdfast.protocol.launcher_messages import INF, JUMP, NAN, BadNumberKind
from holdfast.protocol.progress import FLAG_JUMP, FLAG_NONFINITE
from holdfast.state import gradients, torch_hooks
from holdfast.state.device import Device
from holdfast.state.gradients import GradientProbe, StepNumbers
from holdfast.state.loss_guard import OK, LossGuard, NumberVerdict, finiteness
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank

if TYPE_CHECKING:
    import torch

_IN_WORDS: Mapping[BadNumberKind, str] = {
    NAN: "not a number",
    INF: "infinite",
    JUMP: "far above the recent ones",
}


class NumberCheck:
    """Checks the numbers of one rank's steps, from the gradients before the optimizer's write to the verdict.

    On a GPU, a step's numbers may reach the host only after the step's commit. They are checked at the next
    step's commit, before a pause, or at the end of the loop, whichever comes first.
    """

    def __init__(
        self,
        rank: Rank,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        device: Device,
        gate: WriteGate,
        guard: LossGuard | None,
    ) -> None:
        """Prepare the checks. Without a `guard`, a loss is bad only if it is not finite, not if it jumps."""
        self._rank, self._device, self._gate, self._guard = rank, device, gate, guard
        self._modules, self._optimizers = modules, optimizers
        self._gradients = GradientProbe(optimizers, device)
        self._probe: torch.Tensor | None = None  # a number computed from this step's gradients, on the device
        self._has_bad_gradient = False
        self._is_scaled = False  # a GradScaler decides whether the optimizer writes
        self._unjudged: StepNumbers | None = None  # the last step's numbers, if they are not checked yet
        self.judged: StepNumbers | None = None  # the numbers that were checked last
        self.poison_step: int | None = None  # the step for which a drill requested a bad number
        self.is_poisoned = False  # a drill has made a forward pass produce a bad gradient

    # -- in the order of a step

    def probe_gradients(self) -> bool:
        """Check the gradients that the optimizer is about to use; return True if they are known to be bad.

        On a device, their values are not known yet. So the device reduces them to one number, which is
        checked together with the loss. Only at the end of the step is it known whether bad gradients have
        reached the state (see `_judge`). With fused optimizers, a GradScaler makes the optimizer's kernel
        skip a step that has bad gradients. Bad gradients are then not a fault, because the scaler uses them
        to adjust its scale.
        """
        self._is_scaled = any(getattr(each, "found_inf", None) is not None for each in self._optimizers)
        if self._is_scaled:
            return False
        if self._device.queues:
            self._probe = self._gradients.probe()
            return False
        if self._gradients.finite():
            return False
        self._has_bad_gradient = True
        return True

    def receive(self, step: int, loss: Any, norm: Any, position: int) -> StepNumbers:
        """Accept the numbers that the script commits for `step`, and check them if they have arrived.

        On a device, this first waits for the previous step's numbers and checks them. The gradient norm is
        checked only if the optimizer used the gradients, because a GradScaler deliberately lets gradients
        overflow, and skips such steps. Raises the same errors as `_judge`.
        """
        loss = self._poisoned_loss(step, loss)
        if not self._gate.writing or self._is_scaled:
            norm = None
        numbers = StepNumbers(self._device, step, loss, norm, self._probe, position)
        self._probe = None
        if self._device.queues:
            self._gate.keep_pace()
            self.check_pending(step)
        if numbers.late:
            self._unjudged = numbers
        else:
            self._judge(numbers, step)
        return numbers

    def check_pending(self, step: int) -> None:
        """Wait for the unchecked numbers, if there are any, and check them. For `step`, see `_judge`."""
        numbers = self._unjudged
        if numbers is not None:
            numbers.receive()
            self._judge(numbers, step)
            self._unjudged = None

    # -- for the listener's thread

    def bad_before(self, step: int) -> StepNumbers | None:
        """Return the unchecked numbers of a step before `step`, if they have arrived and are bad, or None.

        If the result is not None, the state of `step` is bad as well.
        """
        numbers = self._unjudged
        if numbers is None or numbers.step >= step or not numbers.spoilt():
            return None
        return numbers

    def report_unchecked(self, numbers: StepNumbers) -> None:
        """Report bad numbers, because the script's thread may never check them."""
        self._rank.report(NAN, numbers.step, numbers.loss, numbers.position)

    # -- drills

    def poison(self, step: int) -> None:
        """Make the loss, gradients and parameters NaN, as a bad batch would, from the next forward pass on.

        If no hook observes the script's forward passes, this happens in the step after `step`.
        """
        self.poison_step = step

    def _poisoned_loss(self, step: int, loss: Any) -> Any:
        if self.is_poisoned:
            return math.nan
        if self.poison_step is not None and self.poison_step < step:
            torch_hooks.poison(self._optimizers)  # no hook observes this script's forward passes
            return math.nan
        return loss

    # -- checking

    def _judge(self, numbers: StepNumbers, step: int) -> None:
        """Judge `numbers`. If they are bad, report them and wait for the rollback, which ends this process.

        `step` is the step of the current state. The progress page shows bad numbers under this step.

        Raises:
            NumericFault: the numbers are bad, and no rollback took place.
        """
        loss, norm = numbers.loss if numbers.has_loss else 0.0, numbers.norm
        guard = self._guard if numbers.has_loss else None
        bad, self._has_bad_gradient = self._has_bad_gradient or not numbers.gradients_finite, False
        if (bad or (norm is not None and not math.isfinite(norm))) and not self._is_state_spoilt():
            norm, bad = None, False  # the optimizer skipped the step, or the script cleaned the gradients
        verdict = _verdict(guard, loss, norm)
        accepted = self._rank.accepts(numbers.step, loss) if verdict == JUMP else ""
        if accepted:
            verdict = OK
        if verdict == OK and bad:
            verdict = NAN
        self.judged = numbers
        if verdict == OK:
            self._learn(guard, numbers.step, loss, norm, accepted)
            return
        why = guard.usual() if guard is not None and verdict == JUMP else ""
        if accepted or _verdict(guard, loss, None) == OK:
            # Only the gradients are bad, and they are the same on all ranks. Let the rank whose loss is bad
            # report first.
            self._rank.yield_to_reporter()
        if self._rank.page is not None:
            flags = FLAG_JUMP if verdict == JUMP else FLAG_NONFINITE
            shown = math.nan if norm is None else norm
            self._rank.page.commit(step, loss, shown, 0, 0, 0.0, flags, numbers.position)
        self._rank.report_bad_number(verdict, numbers.step, loss, numbers.position, why)
        where = f"(batch position {numbers.position})"
        raise NumericFault(f"step {numbers.step}: loss {loss:g} is {_IN_WORDS[verdict]} {where}")

    def _is_state_spoilt(self) -> bool:
        """Return True if bad gradients have reached the state. This waits for the device to do all work."""
        self._device.wait(self._device.mark())
        return gradients.state_is_spoilt(self._modules, self._optimizers)

    def _learn(
        self, guard: LossGuard | None, step: int, loss: float, norm: float | None, accepted: str
    ) -> None:
        """Let the guard learn from a good step. `accepted` is the reason if its loss has jumped."""
        if guard is None:
            return
        if accepted:
            self._rank.note(f"loss {loss:.6g} at step {step}; {guard.usual()}: {accepted}")
            guard.accept(loss)
        else:
            guard.learn(loss, norm)


def _verdict(guard: LossGuard | None, loss: float, norm: float | None) -> NumberVerdict:
    return guard.check(loss, norm) if guard is not None else finiteness(loss, norm)
