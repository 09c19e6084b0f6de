"""A step's own numbers (its loss, its gradients' norm) on their way from the device to a verdict.

On a device they are there when the step's kernels are done. The host does not wait for that: it asks for them
to be brought, and looks at them when it commits the next step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from holdfast.accelerator import Brought, Device

if TYPE_CHECKING:
    import torch


class Numbers:
    """Of one step. `late`: they are not known yet; `waited`: the script had them from the device itself."""

    def __init__(
        self,
        device: Device,
        step: int,
        loss: Any,
        norm: Any,
        probe: torch.Tensor | None = None,
        position: int = -1,
    ) -> None:
        """`probe` is finite on the device if the gradients were, None where they were not asked."""
        self.step, self.position = step, position
        self.has_loss, self.has_norm = loss is not None, norm is not None
        given = {"loss": loss, "grad_norm": norm, "probe": probe}
        there = {k: v for k, v in given.items() if v is not None and device.queues and _on(device, v)}
        self._known = {k: _number(v) for k, v in given.items() if v is not None and k not in there}
        self.waited = bool(self._known)
        self._names = list(there)
        self._device = device
        self._brought: Brought | None = device.bring(list(there.values())) if there else None

    @property
    def late(self) -> bool:
        return self._brought is not None

    def receive(self) -> None:
        """Wait until all are known."""
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
        """Say which of those that have arrived is no finite number; "" when all are. Changes nothing."""
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
