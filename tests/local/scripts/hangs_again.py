"""Hang on rank 1 whenever it reaches a step: python hangs_again.py HOW STEP."""

from __future__ import annotations

import sys
import threading
import time

import torch
import torch.distributed as dist
from tiny_model import Sampler, train

how, at = sys.argv[1], int(sys.argv[2])


def batch(step: int, sampler: Sampler) -> torch.Tensor:
    if step == at and sampler.rank == 1:
        hang()
    return sampler.batch()


def hang() -> None:
    if how == "lock":
        threading.Event().wait()
    if how == "barrier":
        dist.barrier()
    while True:
        time.sleep(1)


train(10_000_000, data=batch, pace_s=0.01)
