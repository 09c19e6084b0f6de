"""Train; a file named PHASE-RANK in the folder argv[1] makes a rank slow in a phase."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import tiny_model
import torch
from tiny_model import Sampler, train
from torch import nn

folder = Path(sys.argv[1])
pace_s = 0.01
model_of = tiny_model.model_of
pause = threading.Event()
rank = -1


def take_time(phase: str) -> None:
    """Take the usual time, or five times as long."""
    pause.wait(pace_s * (5 if (folder / f"{phase}-{rank}").exists() else 1))


class Slowing(nn.Module):
    """A layer that takes some time."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        take_time("forward")
        return given


def data(_step: int, sampler: Sampler) -> torch.Tensor:
    global rank
    rank = sampler.rank
    take_time("data")
    return sampler.batch()


tiny_model.model_of = lambda width: nn.Sequential(model_of(width), Slowing())
train(10_000_000, data=data, pace_s=0)
