"""Judge the numbers of each step (its loss, its gradients' norm, its gradients) and report the bad ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import NumericFault
from holdfast.protocol.progress import FLAG_JUMP, FLAG_NONFINITE
from holdfast.state import gradients, torch_hooks
from holdfast.state.device import Device
from holdfast.state.gradients import GradientProbe, StepNumbers
from holdfast.state.loss_guard import LossGuard
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.rank import Rank

if TYPE_CHECKING:
    import torch

_IN_WORDS = {"nan": "not a number", "inf": "infinite", "jump": "far above the recent ones"}


class NumberCheck:
    """The numbers of one rank's steps, from the gradients before the optimizer's write to the verdict.

    On a GPU the numbers of a step may arrive after its commit: they are judged when the next step is
    committed, before the script's pause, or at the end of its loop, whichever comes first.
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
        """`guard` tells a loss that jumped from a noisy one; without it only what is not finite is bad."""
        self._rank, self._device, self._gate, self._guard = rank, device, gate, guard
        self._modules, self._optimizers = modules, optimizers
        self._gradients = GradientProbe(optimizers, device)
        self._probe: torch.Tensor | None = None  # of this step's gradients, on the device
        self._has_bad_gradient = False
        self._is_scaled = False  # a GradScaler decides whether the optimizer writes
        self._unjudged: StepNumbers | None = None  # of the step before, which may not have arrived
        self.judged: StepNumbers | None = None  # the last ones
        self.poison_step: int | None = None  # the step in which a drill asked for a bad number
        self.is_poisoned = False  # a pass was made to end in a bad gradient, for a drill

    # -- in the order of a step

    def probe_gradients(self) -> bool:
        """Read the gradients that the optimizer is about to use; return True if they are known to be bad.

        On a device they are not known yet: a number is made of them there, and judged with the loss. Whether
        bad ones have reached the state is known when the step is over (`_judge`).
        Where a GradScaler leaves it to the optimizer's kernel to skip a step with bad gradients (fused
        optimizers do that), they are not a fault: they are how the scaler finds its scale.
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

    def take(self, step: int, loss: Any, norm: Any, position: int) -> StepNumbers:
        """Take the numbers that the script commits `step` with, and judge those that are here.

        On a device those of the step before are waited for, and judged. The gradients' norm is judged only if
        the optimizer used them: a GradScaler leaves out, by design, a step in which they overflowed.
        Raises as `_judge` does.
        """
        loss = self._poisoned_loss(step, loss)
        if not self._gate.writing or self._is_scaled:
            norm = None
        numbers = StepNumbers(self._device, step, loss, norm, self._probe, position)
        self._probe = None
        if self._device.queues:
            self._gate.keep_pace()
            self.settle(step)
        if numbers.late:
            self._unjudged = numbers
        else:
            self._judge(numbers, step)
        return numbers

    def settle(self, step: int) -> None:
        """Wait for the numbers that have not been judged, and judge them. The page has the state's `step`."""
        numbers = self._unjudged
        if numbers is not None:
            numbers.receive()
            self._judge(numbers, step)
            self._unjudged = None

    # -- for the listener's thread

    def bad_before(self, step: int) -> StepNumbers | None:
        """Return numbers of a step before `step` that are here, are not judged and are bad; None for none.

        They mean that the state of `step` is not good.
        """
        numbers = self._unjudged
        if numbers is None or numbers.step >= step or not numbers.spoilt():
            return None
        return numbers

    def report_unjudged(self, numbers: StepNumbers) -> None:
        """Report bad numbers that the script's thread may never get to judge."""
        self._rank.report("nan", numbers.step, numbers.loss, numbers.position)

    # -- drills

    def poison(self, step: int) -> None:
        """Make the step after `step` a real NaN, as a bad batch does: loss, gradients, parameters."""
        self.poison_step = step

    def _poisoned_loss(self, step: int, loss: Any) -> Any:
        if self.is_poisoned:
            return math.nan
        if self.poison_step is not None and self.poison_step < step:
            torch_hooks.poison(self._optimizers)  # the forward passes of this script are not seen
            return math.nan
        return loss

    # -- judging

    def _judge(self, numbers: StepNumbers, step: int) -> None:
        """Report bad numbers and wait to be rolled back; the page shows them at `step`, the state's.

        Raises:
            NumericFault: they are bad, and no rollback came.
        """
        loss, norm, given = numbers.loss if numbers.has_loss else 0.0, numbers.norm, numbers.has_loss
        bad, self._has_bad_gradient = self._has_bad_gradient or not numbers.gradients_finite, False
        if (bad or (norm is not None and not math.isfinite(norm))) and not self._is_state_spoilt():
            norm, bad = None, False  # the optimizer left the step out, or had the gradients cleaned
        verdict = self._verdict(numbers.step, loss, norm, given)
        if verdict == "ok" and bad:
            verdict = "nan"
        self.judged = numbers
        if verdict == "ok":
            return
        why = self._guard.usual() if self._guard is not None and verdict == "jump" else ""
        if self._verdict(numbers.step, loss, None, given) == "ok":
            # All ranks share the gradients: the rank whose loss is bad reports first.
            self._rank.yield_to_reporter()
        if self._rank.page is not None:
            flags = FLAG_JUMP if verdict == "jump" else FLAG_NONFINITE
            shown = math.nan if norm is None else norm
            self._rank.page.commit(step, loss, shown, 0, 0, 0.0, flags, numbers.position)
        self._rank.report_bad_number(verdict, numbers.step, loss, numbers.position, why)
        where = f"(batch position {numbers.position})"
        raise NumericFault(f"step {numbers.step}: loss {loss:g} is {_IN_WORDS[verdict]} {where}")

    def _is_state_spoilt(self) -> bool:
        """Return True if bad gradients have reached the state. Waits for all that is queued."""
        self._device.wait(self._device.mark())
        return gradients.state_is_spoilt(self._modules, self._optimizers)

    def _verdict(self, step: int, loss: float, norm: float | None, given: bool) -> str:
        """Return "ok", "nan", "inf" or "jump", and let the guard learn a loss that is `given`."""
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
