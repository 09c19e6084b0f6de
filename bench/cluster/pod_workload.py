"""The script that `python -m bench cluster` trains in pods, under Holdfast and under torchrun.

It is mounted in the pods from a ConfigMap, so it can import only torch and holdfast.
"""

from __future__ import annotations

import os
import struct
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast

TICKS = "/tmp/ticks"  # in the container: its files survive a restart of the processes
RECORD = struct.Struct("<qqqq")  # CLOCK_MONOTONIC in ns, step, pid, restarts of the group
PACE_S = 0.02
STEPS = 10_000_000


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 640), torch.nn.ReLU(), torch.nn.Linear(640, 640))
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.join()
    replica = DistributedDataParallel(model)
    state = session.protect(model=model, optimizer=optimizer)
    ticks = os.open(TICKS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    inputs = torch.ones(8, 64)
    for step in state.steps(STEPS):
        loss = replica(inputs).square().mean()
        loss.backward()
        optimizer.step()
        os.write(ticks, RECORD.pack(time.monotonic_ns(), step, os.getpid(), restarts))
        optimizer.zero_grad()
        state.commit(loss=loss)
        time.sleep(PACE_S)


if __name__ == "__main__":
    main()
