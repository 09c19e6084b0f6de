"""State of any size beside the bench's small model: as a large model's, it is another after each step.

It is part of the optimizer's state, where two thirds of a real one are. Each step writes to all of its
tensors, but only a few numbers: what a step takes stays that of the small model.
"""

from __future__ import annotations

import os

import torch

STATE = "HOLDFAST_BENCH_STATE"  # bytes
TENSORS = 24
KEY = "ballast"


class Ballast:
    """Tensors of `total_bytes` in all, the same on every rank, in the state of the first parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_bytes: int) -> None:
        self._optimizer = optimizer
        self._first = optimizer.param_groups[0]["params"][0]
        self._count = total_bytes // 4 // TENSORS

    @classmethod
    def from_environment(cls, optimizer: torch.optim.Optimizer) -> Ballast | None:
        """Return what the environment asks for, None when that is nothing."""
        total_bytes = int(os.environ.get(STATE, "0"))
        return cls(optimizer, total_bytes) if total_bytes else None

    def step(self, step: int) -> None:
        """Write to every tensor. They are made after the optimizer's first step, which makes its own."""
        state = self._optimizer.state[self._first]
        if KEY not in state:
            state[KEY] = [torch.ones(self._count) for _ in range(TENSORS)]
        for tensor in state[KEY]:
            tensor[step % self._count] += 1
