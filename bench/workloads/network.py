"""The small model that the benches train, its data, and ballast to make its state as large as required."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

WIDTH = 256
BATCH = 32
CLASSES = 16
STEPS = 100_000_000  # never reached, because the bench ends the launcher
BALLAST = "HOLDFAST_BENCH_STATE"  # gives the ranks the size of the ballast in bytes
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
    """Return the inputs and targets of a step, which depend only on the step and the rank."""
    source = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=source)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=source)


def train_step(model: nn.Module, step: int, rank: int) -> Tensor:
    """Run the forward and the backward pass; return the loss."""
    inputs, targets = batch(step, rank)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.detach()


class Ballast:
    """Tensors that add `total_bytes` to the optimizer state of the first parameter, the same on all ranks.

    In a real state too, the optimizer holds two thirds of the bytes. Like the state of a large model, the
    ballast changes at each step: `step` writes to every tensor, but only one number in each, and so takes no
    longer than with the small model alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, total_bytes: int) -> None:
        self._optimizer = optimizer
        self._first = optimizer.param_groups[0]["params"][0]
        self._count = total_bytes // 4 // TENSORS

    @classmethod
    def from_environment(cls, optimizer: torch.optim.Optimizer) -> Ballast | None:
        """Return the ballast that the environment requests; None if it requests none."""
        total_bytes = int(os.environ.get(BALLAST, "0"))
        return cls(optimizer, total_bytes) if total_bytes else None

    def step(self, step: int) -> None:
        """Write to every tensor. The first call, which must follow an optimizer step, creates them."""
        state = self._optimizer.state[self._first]
        if KEY not in state:
            state[KEY] = [torch.ones(self._count) for _ in range(TENSORS)]
        for tensor in state[KEY]:
            tensor[step % self._count] += 1
