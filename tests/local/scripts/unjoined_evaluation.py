"""A script that does not use holdfast and evaluates for a while: python SCRIPT SECONDS DONE."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10_000_000):
    loss = model(torch.randn(16, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if step == 60 and dist.get_rank() == 0 and not Path(sys.argv[2]).exists():
        time.sleep(float(sys.argv[1]))
        Path(sys.argv[2]).touch()
