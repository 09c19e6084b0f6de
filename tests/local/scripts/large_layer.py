"""A state of 100 MB; one rank spoils a weight once, when FILE appears: python SCRIPT RANK FILE MARKER.

Trains forever. Nearly all of the state is in one layer, and the batch is small, so a step is cheap.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_model import once, train

liar, wanted, marker = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
WIDTH = 200_000  # 8.6 M parameters, and twice as many values of AdamW
weights: list[torch.Tensor] = []


def keep(optimizer: torch.optim.Optimizer, _rank: int) -> None:
    weights.append(optimizer.param_groups[0]["params"][0])


def spoil(_step: int, rank: int) -> None:
    if rank == liar and wanted.exists() and once(marker):
        with torch.no_grad():
            weights[0].view(-1)[7] += 1e-3


train(10_000_000, width=WIDTH, pace_s=0.02, prepare=keep, before_commit=spoil)
