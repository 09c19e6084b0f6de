"""The small model that the benches train, its data, and ballast that makes its state as large as wanted."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

WIDTH = 256
BATCH = 32
CLASSES = 16
STEPS = 100_000_000  # never reached: the bench ends the launcher
BALLAST = "HOLDFAST_BENCH_STATE"  # names the ballast's size to the ranks, in bytes
TENSORS = 24
KEY = "ballast"


def build() -> nn.Module:
    """Return a small network, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.LayerNorm(2 * WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, CLASSES),
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step: a pure function of step and rank."""
    source = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=source)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=source)


def train_step(model: nn.Module, step: int, rank: int) -> Tensor:
    """Run forward and backward; return the loss."""
    inputs, targets = batch(step, rank)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.detach()


class Ballast:
    """Tensors of `total_bytes` in all, the same on every rank, in the optimizer state of the first parameter.

    Two thirds of a real state are in the optimizer, too. Like a large model's state, the ballast changes at
    each step: `step` writes to every tensor, but only a few numbers, so that a step takes as long as the
    small model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, total_bytes: int) -> None:
        self._optimizer = optimizer
        self._first = optimizer.param_groups[0]["params"][0]
        self._count = total_bytes // 4 // TENSORS

    @classmethod
    def from_environment(cls, optimizer: torch.optim.Optimizer) -> Ballast | None:
        """Return the ballast that the environment requests; None when it requests none."""
        total_bytes = int(os.environ.get(BALLAST, "0"))
        return cls(optimizer, total_bytes) if total_bytes else None

    def step(self, step: int) -> None:
        """Write to every tensor. The first call makes them, after the optimizer has made its own state."""
        state = self._optimizer.state[self._first]
        if KEY not in state:
            state[KEY] = [torch.ones(self._count) for _ in range(TENSORS)]
        for tensor in state[KEY]:
            tensor[step % self._count] += 1
