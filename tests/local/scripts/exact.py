"""Weights that are the same on every machine, bit for bit: a state written elsewhere can be resumed here.

Gradients are ones and halves, and the momentum is a half: no sum of `STEPS` of them is ever rounded. The
batches are drawn from the generator of the process, whose state is private to a rank.

While there is a file `bug` in the working directory, rank 1 has the bug that it names in step 9, each time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import holdfast

STEPS = 14
BUG = Path("bug")
BUGGY_STEP = 9


def batch(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (4, 4), generator=generator).float()


def weights_after(steps: int, world_size: int) -> Tensor:
    """Return the weights of an undisturbed run."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    weights, momentum = torch.zeros(4, 4), torch.zeros(4, 4)
    for _ in range(steps):
        momentum = momentum / 2 + torch.stack([batch(each) for each in generators]).mean(0)
        weights = weights - momentum
    return weights


def fails(rank: int, step: int) -> str:
    """Fail as the file `bug` says, or return what is to be done to the loss."""
    what = BUG.read_text() if rank == 1 and step == BUGGY_STEP and BUG.exists() else ""
    if what == "raise":
        raise ValueError("the bug")
    if what == "exit":
        sys.exit(3)
    if what in ("kill", "kill, then exit"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":  # until a test breaks something else
        time.sleep(600)
    return what


def exit_at_third_start(rank: int) -> None:
    """Exit before the group can make a snapshot, if the file `bug` says so and step 9 has failed twice."""
    if rank != 1 or not BUG.exists() or BUG.read_text() != "kill, then exit":
        return
    done = Path(f"steps-{rank}")
    if done.exists() and done.read_text().split().count(str(BUGGY_STEP)) == 2:
        sys.exit(5)


module = nn.Linear(4, 4, bias=False)
nn.init.zeros_(module.weight)
session = holdfast.join()
exit_at_third_start(session.rank)
torch.manual_seed(session.rank)
model = nn.parallel.DistributedDataParallel(module.to(session.device))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
state = session.protect(model=model, optimizer=optimizer)
began = -1
for step in state.steps(STEPS):
    began = step if began < 0 else began
    with Path(f"steps-{session.rank}").open("a") as file:
        file.write(f"{step}\n")
    time.sleep(float(sys.argv[1]))
    loss = model(torch.eye(4)).mul(batch(torch.default_generator).T).sum()
    loss = loss * torch.nan if fails(session.rank, step) == "nan" else loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.commit(loss=loss)
exact = torch.equal(module.weight, weights_after(STEPS, session.world_size))
print(f"rank {session.rank} began at step {began}; its weights are exact: {exact}", flush=True)
