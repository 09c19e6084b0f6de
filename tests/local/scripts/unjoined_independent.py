"""A script that does not use holdfast. For a while no rank waits for another: python SCRIPT SECONDS."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def add(count: int) -> int:
    return sum(number * number for number in range(count))


def evaluate(seconds: float) -> None:
    """Compute until the time is over. Each rank has its own part, and some parts take longer than others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        add(60_000)


dist.init_process_group("gloo")
rank, seconds = dist.get_rank(), float(sys.argv[1])
model = nn.parallel.DistributedDataParallel(nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(90):
    model(torch.randn(16, 32)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if step == 40:
        time.sleep(seconds)  # for new data
    if step == 70:
        evaluate(seconds * (1 + 0.2 * rank))
print(f"rank {rank} is done, restarted {os.environ['TORCHELASTIC_RESTART_COUNT']} times", flush=True)
