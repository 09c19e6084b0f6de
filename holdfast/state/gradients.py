"""Check that gradients are finite before the optimizer's first write, while the state is still intact.

If a loss is NaN, the backward pass computes NaN for every gradient, because sums over the batch spread the
NaN. DDP's all-reduce spreads it to all ranks. So it is enough to check two small gradients, which takes
microseconds. If both belong to a branch of the model that the NaN does not reach, the NaN is detected in the
loss at the commit, after the optimizer's write.

Gradients that are not finite are a fault only if they reach the state. They do not reach it if the optimizer
has its own loss scale and skips such a step, or if the script cleans the gradients first. So after a step
with such gradients, and only then, the whole state is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.state import capture
from holdfast.state.device import Device, HostDevice, PendingNumbers

if TYPE_CHECKING:
    import torch


PROBED_TENSORS = 2
# Gradients with more elements are not probed. If all gradients of a model are larger, none is checked.
MAX_ELEMENTS = 1 << 16


class GradientProbe:
    """Checks a few of the gradients that the optimizers are about to use.

    On a GPU, reading the gradients would mean waiting for the backward pass and delaying the next kernels. So
    the device computes their sum in its queue, and the host checks the sum together with the step's loss.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], device: Device | None = None) -> None:
        self._optimizers = list(optimizers)
        self._device: Device = device or HostDevice()
        self._chosen: list[torch.Tensor] = []

    def finite(self) -> bool:
        """Return whether all probed gradients are finite.

        The result is also True if no gradient can be probed, or if a gradient scaler checks the gradients and
        skips the step itself.
        """
        if self._scaler_checks():
            return True
        self._choose()
        return all(math.isfinite(_sum(each)) for each in self._chosen)

    def probe(self) -> torch.Tensor | None:
        """Return a one-element tensor on the device. It is finite if the probed gradients are finite.

        The result is None if no gradient can be probed, or if a gradient scaler checks the gradients and
        skips the step itself.
        """
        import torch

        self._choose()
        found = [each.grad for each in self._chosen if each.grad is not None and not each.grad.is_sparse]
        if not found or self._scaler_checks():
            return None
        with torch.no_grad():
            return torch.stack([each.detach().sum(dtype=torch.float64) for each in found]).sum()

    def _scaler_checks(self) -> bool:
        return any(getattr(each, "found_inf", None) is not None for each in self._optimizers)

    def _choose(self) -> None:
        if not self._chosen:
            self._chosen = sorted(self._candidates(), key=lambda each: each.numel())[:PROBED_TENSORS]

    def _candidates(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    if grad is None or not 0 < grad.numel() <= MAX_ELEMENTS:
                        continue
                    if self._device.holds(grad) if self._device.queues else grad.device.type == "cpu":
                        yield parameter


def _sum(parameter: torch.Tensor) -> float:
    """Return the sum of the gradient's elements. Unless it overflows, it is finite if all elements are."""
    grad = parameter.grad
    if grad is None or grad.is_sparse:
        return 0.0
    return float(grad.double().sum()) if grad.dtype.itemsize < 4 else float(grad.sum())


def state_is_spoilt(modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Return whether a parameter, an optimizer's state or a buffer contains a number that is not finite.

    This reads the whole state. In buffers, only NaN counts as not finite, because a mask may contain
    infinities by design.
    """
    import torch

    buffers = (each for module in modules for each in module.buffers())
    with torch.no_grad():
        return not all(map(_is_finite, _written(modules, optimizers))) or any(map(_has_nan, buffers))


def _written(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    import torch

    for module in modules:
        yield from module.parameters()
    for outer in optimizers:
        for each in (outer, *capture.wrapped_optimizers(outer).values()):
            yield from capture.parameters(each)
            for values in each.state.values():
                if isinstance(values, dict):
                    yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _is_finite(tensor: torch.Tensor) -> bool:
    return not _is_float(tensor) or bool(_testable(tensor).isfinite().all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return _is_float(tensor) and bool(_testable(tensor).isnan().any())


def _is_float(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta"


def _testable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in a type that supports `isfinite`, as some one-byte types do not."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return values.float() if values.dtype.itemsize < 2 else values


class StepNumbers:
    """One step's loss, gradient norm and gradient probe, perhaps still on the device.

    On a device, the numbers are available once the step's kernels have completed. Instead of waiting for
    that, the host queues a copy, and checks the numbers when it commits the next step. `waited` is True if
    the script passed at least one of the numbers as a number on the host. To read that number, the script
    must have waited for the device.
    """

    def __init__(
        self,
        device: Device,
        step: int,
        loss: Any,
        norm: Any,
        probe: torch.Tensor | None = None,
        position: int = -1,
    ) -> None:
        """Start copying the numbers that are on the device.

        `probe` is the result of `GradientProbe.probe`, or None if the gradients were not probed.
        """
        self.step, self.position = step, position
        self.has_loss, self.has_norm = loss is not None, norm is not None
        given = {"loss": loss, "grad_norm": norm, "probe": probe}
        there = {k: v for k, v in given.items() if v is not None and device.queues and _on(device, v)}
        self._known = {k: _number(v) for k, v in given.items() if v is not None and k not in there}
        self.waited = bool(self._known)
        self._names = list(there)
        self._device = device
        self._brought: PendingNumbers | None = device.bring(list(there.values())) if there else None

    @property
    def late(self) -> bool:
        """True if a number was on the device and `receive` has not returned yet."""
        return self._brought is not None

    def receive(self) -> None:
        """Wait until all numbers are on the host."""
        if self._brought is not None:
            self._device.wait(self._brought.mark)
            self._known = {**self._known, **dict(zip(self._names, self._brought.values(), strict=True))}
            self._brought = None

    @property
    def loss(self) -> float:
        return self._known.get("loss", math.nan)

    @property
    def norm(self) -> float | None:
        return self._known.get("grad_norm")

    @property
    def gradients_finite(self) -> bool:
        return math.isfinite(self._known.get("probe", 0.0))

    def spoilt(self) -> str:
        """Describe the first number that is not finite; return "" if all are finite or have not arrived.

        This does not wait for the device.
        """
        known, brought = dict(self._known), self._brought
        if brought is not None:
            if not self._device.reached(brought.mark):
                return ""
            known.update(zip(self._names, brought.values(), strict=True))
        words = {"loss": "the loss", "grad_norm": "the gradients' norm", "probe": "a gradient"}
        bad = [name for name, value in known.items() if not math.isfinite(value)]
        return f"{words[bad[0]]} of step {self.step} is {known[bad[0]]:g}" if bad else ""


def _on(device: Device, value: Any) -> bool:
    return hasattr(value, "numel") and device.holds(value)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)
