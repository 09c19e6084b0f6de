"""Train in epochs of 20 steps, and do something at the end: python epochs_then_work.py FOLDER EPOCHS HOW.

HOW: plain, weights (loads other weights after training), or at_once (exits without cleanup).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tiny_model import Sampler, model_of, write_digest
from torch import nn

import holdfast

folder, epochs, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
module = model_of()
session = holdfast.join()
torch.manual_seed(session.rank)
model = nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = Sampler(session.rank)
state = session.protect(model=model, optimizer=optimizer, sampler=sampler)

for epoch in range(state.step // 20, epochs):
    for step in state.steps(20 * (epoch + 1)):
        loss = model(sampler.batch()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit(loss=loss)
        with (folder / f"steps.{session.rank}").open("a") as log:
            log.write(f"{step}\n")
    with state.pause("eval"), torch.no_grad():
        module.eval()
        module(torch.zeros(4, 32))
        module.train()
write_digest(folder / f"digest.{session.rank}", module, optimizer)
if how == "weights":
    module.load_state_dict({name: value * 0 for name, value in module.state_dict().items()})
if how == "at_once":
    os._exit(0)
