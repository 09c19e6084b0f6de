"""Warn of gradients that the script accumulates across a commit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.state import capture
from holdfast.state.device import Device, PendingNumbers

if TYPE_CHECKING:
    from types import FrameType

    import torch
    from torch.utils.hooks import RemovableHandle

_TRAINING = str(Path(__file__).parents[1]) + os.sep  # the folder of `holdfast.training`
WATCHED = 4  # the number of gradients to watch; one call of `Device.bring` can copy this many numbers


class AccumulatedGradients:
    """Warns of gradients that the script accumulates across a commit, because snapshots do not contain them.

    A commit without an optimizer step is not a mistake in itself: a gradient scaler may have skipped the
    step, or the step may only evaluate. After such a commit, this class watches a few gradients until the
    next backward pass reaches them. If a gradient is then unchanged and not zero, the backward pass is about
    to add to it.
    """

    def __init__(self, modules: Iterable[Any], device: Device, say: Callable[[str], None]) -> None:
        self._modules, self._device, self._say = list(modules), device, say
        self._hooks: list[RemovableHandle] = []
        # On a device, the number of nonzero elements of each gradient.
        self._brought: PendingNumbers | None = None
        self._added = self._warned = False

    def watch(self) -> None:
        """Start watching a few gradients, because no optimizer has stepped in the step being committed."""
        found = [] if self._warned else list(islice(self._candidates(), WATCHED))
        for parameter, grad in found:
            same = grad.data_ptr(), capture.version(grad)
            self._hooks.append(parameter.register_hook(partial(self._before, parameter, same)))
        if found and self._device.queues:
            counts = [(grad.detach() != 0).sum() for _, grad in found]
            self._brought = self._device.bring(counts)

    def check(self) -> None:
        """At the commit of the next step, warn once if that step has added to a watched gradient."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        brought, self._brought = self._brought, None
        if not self._added:
            return
        self._added = False
        if brought is not None:
            self._device.wait(brought.mark)
            if not any(brought.values()):
                return
        self._warned = True
        commit = _caller_of_commit()
        name, line = commit.f_code.co_filename.rpartition("/")[2], commit.f_lineno
        self._say(
            f"gradients are accumulated across commit() ({name}, line {line}), which does not save "
            "them: a fault between two optimizer steps loses the gradients since the last optimizer step, "
            "and the weights differ from then on. Call optimizer.step() once per step: loop over the "
            "micro-batches within the step, and call commit() once, after it "
            '(see "Gradient accumulation" in the user guide)'
        )

    def _before(self, parameter: torch.Tensor, same: tuple[int, int | None], _: torch.Tensor) -> None:
        """Record whether the backward pass is about to add to `parameter.grad` instead of replacing it."""
        grad = parameter.grad
        if grad is None or (grad.data_ptr(), capture.version(grad)) != same:
            return  # the script has cleared or replaced the gradient since the commit
        self._added = self._added or self._device.queues or bool(grad.detach().any())

    def _candidates(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parameters and their gradients, roughly in the order of backward passes."""
        for module in reversed(self._modules):
            for parameter in reversed(list(module.parameters())):
                grad = parameter.grad
                if not parameter.requires_grad or grad is None or grad.is_sparse:
                    continue
                if self._device.holds(grad) if self._device.queues else grad.device.type == "cpu":
                    yield parameter, grad


def _caller_of_commit() -> FrameType:
    """Return the frame that called `state.commit`: the innermost frame outside `holdfast.training`."""
    frame = sys._getframe(2)  # the caller of the check, within `commit`
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TRAINING):
        frame = frame.f_back
    return frame
