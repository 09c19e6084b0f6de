"""Two ranks of a run train with a third process outside the run: python outside_rank.py PORT [RANK].

Without RANK, the script is a rank of the run. Holdfast does not know about the third process.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

rank = int(sys.argv[2]) if len(sys.argv) > 2 else int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 3, is_master=rank == 2, timeout=timedelta(minutes=5))
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10_000_000):
    loss = model(torch.randn(16, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
