"""Train a large state for 40 steps, and exit after the loop: python large_state.py MEGABYTES.

The first rank ends its loop once another rank has begun to copy the last state.
"""

from __future__ import annotations

import sys
import time

import torch
from tiny_model import model_of
from torch import nn

import holdfast
from holdfast.protocol.defaults import SNAPSHOT_SLOTS
from holdfast.snapshot.arena import Arena
from holdfast.worker import launcher_channel

OVERWRITE_S = 5.0


def until_another_copies() -> None:
    """Wait until another rank of the member overwrites a slot, for at most `OVERWRITE_S`."""
    assert launcher_channel.current_channel is not None
    arena = Arena(launcher_channel.current_channel.arena_path)
    give_up_at = time.monotonic() + OVERWRITE_S
    while len(arena.steps()) == SNAPSHOT_SLOTS and time.monotonic() < give_up_at:
        continue


module = model_of()
session = holdfast.join()
model = nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
table = nn.ParameterList([nn.Parameter(torch.zeros(int(sys.argv[1]) << 18), requires_grad=False)])
state = session.protect(model=model, optimizer=optimizer, table=table)
for step in state.steps(40):
    with torch.no_grad():
        table[0][step] = step
    loss = model(torch.randn(4, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.commit(loss=loss)
    if step == 39 and session.local_rank == 0:
        until_another_copies()
