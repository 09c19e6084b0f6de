"""Fail on rank 1 in step 7, every time: python fails_always.py raise|exit; on all ranks: reset."""

from __future__ import annotations

import sys

import torch
from tiny_model import Sampler, train


class OutOfOrder(Exception):
    """The exception of a bug in a script."""


def data(step: int, sampler: Sampler) -> torch.Tensor:
    if step == 7 and sys.argv[1] == "reset":
        raise RuntimeError(f"reading s3://corpus/{step}: Connection reset by peer")
    if step == 7 and sampler.rank == 1:
        if sys.argv[1] == "exit":
            sys.exit(3)
        raise OutOfOrder(f"step {step} never works")
    return sampler.batch()


train(50, data=data)
