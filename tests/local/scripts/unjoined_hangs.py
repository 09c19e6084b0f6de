"""A script that does not use holdfast, and hangs on rank 1 before its first step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn


def load() -> torch.Tensor:
    while dist.get_rank() == 1:
        time.sleep(1)
    return torch.ones(2, 4)


dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(load()).sum().backward()
optimizer.step()
