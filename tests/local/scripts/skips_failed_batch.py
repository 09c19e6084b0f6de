"""Skip a batch whose step raises, by catching the exception. Rank 1 is killed repeatedly.

python skips_failed_batch.py FOLDER skip|stale|own|own-stale. All ranks skip the unusable batch
of step 5. Rank 1 is killed if FOLDER has a file `kill`. With `stale`, the optimizer steps even after an
exception; with `own`, there is no DDP.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_model import once, write_digest
from torch import Tensor, nn

import holdfast

folder, own, stale = Path(sys.argv[1]), "own" in sys.argv[2], "stale" in sys.argv[2]
KILLED = (9, 16, 17, 25)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = holdfast.join()
replica = nn.parallel.DistributedDataParallel(model) if not own else model
torch.manual_seed(session.rank)
state = session.protect(model=model, optimizer=optimizer)


def dying(step: int, gradient: Tensor) -> Tensor:
    killed = step in KILLED and session.rank == 1 and (folder / "kill").exists()
    if killed and once(folder / f"killed-{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient


def loss_of(step: int) -> Tensor:
    if step == 5:
        raise ValueError("a batch of another shape")
    loss: Tensor = (replica(torch.randn(16, 32)) - 1).square().mean()
    loss.register_hook(lambda gradient: dying(step, gradient))
    return loss


def reduce() -> None:
    """Sum the gradients of all ranks, as a script without DDP does."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if stale:
        for each in gradients:
            dist.all_reduce(each)
        return
    for work in [dist.all_reduce(each, async_op=True) for each in gradients]:
        work.wait()


for step in state.steps(32):
    try:
        loss_of(step).backward()
        if own:
            reduce()
        if not stale:
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        print(f"step {step}: batch left out: {error}", flush=True)
    if stale:
        optimizer.step()
    optimizer.zero_grad(set_to_none=not stale)
    state.commit()
write_digest(folder / f"digest.{session.rank}", model, optimizer)
