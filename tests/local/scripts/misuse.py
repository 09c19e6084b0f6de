"""Misuse the API in one way: python misuse.py WHAT FOLDER.

WHAT is before, after, twice, epochs, never, uneven or early. These continue after a kill: swallows
(catches the error of a lost peer), forgets (does not protect the optimizer), late (changes a protected
object after commit), accumulates (the optimizer steps only in every fourth step).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

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
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
if what == "forgets":
    state = session.protect(model=model)
else:
    state = session.protect(model=model, optimizer=optimizer, scheduler=scheduler)
steps = {
    "uneven": 40 if session.rank == 0 else 60,
    "swallows": 100_000,
    "forgets": 100_000,
    "late": 100_000,
    "accumulates": 100_000,
}.get(what, 60)
for _epoch in range(3 if what == "epochs" else 0):
    for _ in state.steps(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.commit()
for step in state.steps(steps):
    if len(sys.argv) > 2 and Path(sys.argv[2], "enough").exists():
        break
    if what == "early" and session.rank == 1 and step == 31:
        os._exit(0)
    loss = model(torch.ones(2, 4)).sum()
    if what == "never" and step == 40:
        continue
    try:
        loss.backward()
    except RuntimeError:
        if what != "swallows":
            raise
        continue
    if what != "accumulates" or step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    state.commit()
    if what == "late":
        scheduler.step()
    if steps > 60:
        time.sleep(0.002)
    if what == "twice":
        state.commit()
