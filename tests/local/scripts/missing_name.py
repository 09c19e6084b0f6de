"""Call a missing method in step 7, every time, on all ranks or on rank 1: python SCRIPT all|one."""

from __future__ import annotations

import sys
from typing import Any

import torch
from tiny_model import Sampler, train


def data(step: int, sampler: Sampler) -> torch.Tensor:
    if step == 7 and (sys.argv[1] == "all" or sampler.rank == 1):
        misspelt: Any = sampler
        return torch.as_tensor(misspelt.bacth())
    return sampler.batch()


train(50, data=data)
