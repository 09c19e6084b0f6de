"""Fork a child within step 12 of rank 0, which ends on its own: python forks_child.py raise|exit."""

from __future__ import annotations

import os
import sys

import torch
from tiny_model import Sampler, train


def data(step: int, sampler: Sampler) -> torch.Tensor:
    if step == 12 and sampler.rank == 0:
        if (child := os.fork()) == 0:
            if sys.argv[1] == "exit":
                sys.exit(7)
            raise ZeroDivisionError("in the child")
        print("the child's code:", os.WEXITSTATUS(os.waitpid(child, 0)[1]), flush=True)
    return sampler.batch()


train(40, data=data)
