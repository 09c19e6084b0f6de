"""The model and the data of the recovery bench, the same for every launcher."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 256
BATCH = 32
CLASSES = 16
STEPS = 100_000_000  # more than anybody waits for: the launcher is ended instead


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
