"""The recovery bench's training script, with `holdfast.join`; runs under holdfast, under torchrun and alone.

Under holdfast it resumes from the state that was secured at the fault. Under torchrun nothing restores its
state, so it starts over, which spares torchrun the time to load a checkpoint.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast
from bench.harness.ticks import Ticker
from bench.workloads.network import STEPS, Ballast, build, train_step


def main() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.join()
    replica = DistributedDataParallel(model)
    ballast = Ballast.from_environment(optimizer)
    state = session.protect(model=model, optimizer=optimizer)
    ticker = Ticker()
    for step in state.steps(STEPS):
        loss = train_step(replica, step, session.rank)
        optimizer.step()
        if ballast is not None:
            ballast.step(step)
        ticker.tick(step)
        optimizer.zero_grad()
        state.commit(loss=loss)


if __name__ == "__main__":
    main()
