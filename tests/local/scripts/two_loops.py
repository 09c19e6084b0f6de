"""Two loops, and work between them: python two_loops.py guarded|plain FOLDER [STEP ...].

Rank 1 is killed once in each STEP, before its optimizer steps. The work saves the result of the first phase,
halves a weight, and sets another rate. With `guarded`, the work is in the second loop's first step.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from tiny_model import once
from torch import nn

import holdfast

FIRST, ALL = 20, 40
guarded, folder, kills = sys.argv[1] == "guarded", Path(sys.argv[2]), set(map(int, sys.argv[3:]))
torch.manual_seed(0)
first = nn.Linear(8, 16)
model = nn.Sequential(first, nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session = holdfast.join()
replica = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(session.rank)
state = session.protect(model=model, optimizer=optimizer)


def save(name: str) -> None:
    total = hashlib.sha256()
    for part in (*model.state_dict().values(), torch.get_rng_state()):
        total.update(part.numpy().tobytes())
    (folder / f"{name}.{session.rank}").write_text(total.hexdigest())


def between() -> None:
    with state.pause("checkpoint"):
        save("first")
    with torch.no_grad():
        first.weight.mul_(0.5)
    optimizer.param_groups[0]["lr"] = 0.001


def train(step: int) -> None:
    optimizer.zero_grad()
    loss = replica(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    if session.rank == 1 and step in kills and once(folder / f"killed-{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    state.commit(loss=loss)


if not guarded or state.step < FIRST:
    for step in state.steps(FIRST):
        train(step)
if not guarded:
    between()
for step in state.steps(ALL):
    if guarded and step == FIRST:
        between()
    train(step)
save("all")
