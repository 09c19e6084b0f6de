"""The training of `bench.workloads.protected` as a script that does not use holdfast.

It writes no checkpoints, so it starts over after each restart, under every launcher.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.harness.ticks import Ticker
from bench.workloads.network import STEPS, build, train_step


def main() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    ticker = Ticker()
    for step in range(STEPS):
        train_step(replica, step, dist.get_rank())
        optimizer.step()
        ticker.tick(step)
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
