"""The training scripts of the picture: one with `holdfast.join`, and one with checkpoints for torchrun.

Both train the recovery bench's network at a fixed pace, so a step takes equally long under both launchers.
Under torchrun, rank 0 saves the model and the optimizer every `SAVE_EVERY` steps, and each start resumes from
that file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from bench.harness.ticks import Ticker
from bench.workloads.network import STEPS, build, train_step

STEP_S = 0.02
SAVE_EVERY = 250  # steps, which take 5 s at this pace; real jobs save every 10 to 60 minutes
_CHECKPOINT = Path("checkpoint.pt")  # in the launcher's working directory


def train_with_holdfast() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.join()
    replica = DistributedDataParallel(model)
    state = session.protect(model=model, optimizer=optimizer)
    ticker, pace = Ticker(), StepPace()
    for step in state.steps(STEPS):
        loss = train_step(replica, step, session.rank)
        optimizer.step()
        ticker.tick(step)
        optimizer.zero_grad()
        state.commit(loss=loss)
        pace.wait()


def train_with_checkpoints() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    first = _resume(model, optimizer)
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    ticker, pace = Ticker(), StepPace()
    for step in range(first, STEPS):
        train_step(replica, step, dist.get_rank())
        optimizer.step()
        ticker.tick(step)
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0 and dist.get_rank() == 0:
            _save(model, optimizer, step + 1)
        pace.wait()


class StepPace:
    """Sleeps until the next step is due, `STEP_S` after the previous one."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + STEP_S

    def wait(self) -> None:
        now_s = time.monotonic()
        time.sleep(max(0.0, self._due_s - now_s))
        self._due_s = max(self._due_s, now_s) + STEP_S


def _save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    new = _CHECKPOINT.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, new)
    os.replace(new, _CHECKPOINT)


def _resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one, and return how many steps were complete when it was saved."""
    if not _CHECKPOINT.exists():
        return 0
    saved = torch.load(_CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps: int = saved["steps"]
    return steps


if __name__ == "__main__":
    {"holdfast": train_with_holdfast, "torchrun": train_with_checkpoints}[sys.argv[1]]()
