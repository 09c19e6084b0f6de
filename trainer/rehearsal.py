"""Triggers the lazy initialisation of the first step before `holdfast.join()`."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

import holdfast


def rehearse(model: nn.Module, loss_on: Callable[[nn.Module], Tensor]) -> None:
    """Run one forward and backward pass on a copy of `model`, and discard the copy.

    The first pass of a process selects and compiles kernels and touches its memory for the first time, which
    takes as long as several steps. A warm process has done this work before it is needed. The pass changes
    only random states, which are seeded after `join`.

    Does nothing if the model will be trained on a GPU, because the GPU is not known before `join`.
    """
    if holdfast.device().type != "cpu":
        return
    loss_on(copy.deepcopy(model)).backward()
