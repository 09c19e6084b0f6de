"""Get one thing wrong: python misusing.py before|after|twice|uneven|early."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import holdfast

what = sys.argv[1]
if what == "before":
    dist.init_process_group("gloo")
session = holdfast.join()
if what == "after":
    dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = session.protect(model=model, optimizer=optimizer)
for step in state.steps(40 if what == "uneven" and session.rank == 0 else 60):
    if what == "early" and session.rank == 1 and step == 31:
        os._exit(0)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.commit()
    if what == "twice":
        state.commit()
