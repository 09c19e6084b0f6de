"""Do lazily what a first step would do lazily, but before `holdfast.join()`."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

import holdfast


def rehearse(model: nn.Module, loss_on: Callable[[nn.Module], Tensor]) -> None:
    """Train a copy of `model` for one pass and throw it away.

    The first pass of a process picks and compiles its kernels and touches its memory for the first
    time, which takes as long as several steps. A warm process has that behind it when it is
    needed. Changes nothing but random states, which are seeded after `join`.

    Not where it will train on a GPU: which one is not known before `join`.
    """
    if holdfast.device().type != "cpu":
        return
    loss_on(copy.deepcopy(model)).backward()
