"""Trigger the lazy initialisation of the first step before `holdfast.join()`."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

import holdfast


def rehearse(model: nn.Module, loss_on: Callable[[nn.Module], Tensor]) -> None:
    """Run one forward and backward pass on a copy of `model`, and discard the copy.

    The first pass of a process selects and compiles kernels, and touches its memory for the first time. This
    takes as long as several steps; a warm process does it in advance. The pass changes only the random
    states, and those are seeded after `join`.

    If the model will be trained on a GPU, this does nothing, because the GPU is unknown before `join`.
    """
    if holdfast.device().type != "cpu":
        return
    loss_on(copy.deepcopy(model)).backward()
