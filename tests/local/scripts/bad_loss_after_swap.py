"""Swap weights in a pause after step 50; 45 steps later rank 0 has a bad loss: python SCRIPT MARKER.

The loss is spoiled after optimizer.step(), so the state that was written in this step must not be kept.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tiny_model import once, train

weights: list[torch.nn.Parameter] = []
losses: list[torch.Tensor] = []


def prepare(optimizer: torch.optim.Optimizer, _rank: int) -> None:
    weights.extend(p for group in optimizer.param_groups for p in group["params"])


def loss_of(_step: int, _rank: int, output: torch.Tensor) -> torch.Tensor:
    losses[:] = [output.pow(2).mean()]
    return losses[0]


def before_commit(step: int, rank: int) -> None:
    if step == 95 and rank == 0 and once(Path(sys.argv[1])):
        losses[0].detach().fill_(float("nan"))


@torch.no_grad()
def after(_step: int, state: Any) -> None:
    if state.step == 50:
        with state.pause("eval"):
            kept = [p.clone() for p in weights]
            for parameter in weights:
                parameter.add_(1)
            for parameter, old in zip(weights, kept, strict=True):
                parameter.copy_(old)


train(120, loss_of=loss_of, before_commit=before_commit, after=after, prepare=prepare)
