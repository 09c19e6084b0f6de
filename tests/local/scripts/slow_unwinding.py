"""Rank 1 raises once, and its `finally` block takes long: python slow_unwinding.py FOLDER."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from tiny_model import Sampler, once, train

folder = Path(sys.argv[1])


def data(step: int, sampler: Sampler) -> torch.Tensor:
    if step == 25 and sampler.rank == 1 and once(folder / "raised"):
        raise RuntimeError("the batch cannot be read")
    return sampler.batch()


try:
    train(60, data=data)
finally:
    if (folder / "raised").exists() and once(folder / "begins"):
        threading.Event().wait(3.0)  # a tracker that uploads
        (folder / "uploaded").touch()
