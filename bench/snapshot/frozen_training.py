"""The training script of the frozen bench: a small model beside frozen tables, in steps of a given length.

It times each copy of the state by wrapping `SnapshotWriter.write`, and appends the rank, the share of the
state that was read, and the seconds to a file.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from bench.harness.ticks import Ticker
from bench.workloads import network
from holdfast.training.protection.snapshot_writer import SnapshotWriter

BYTES, STEP_S, COPIES = (f"HOLDFAST_BENCH_FROZEN_{name}" for name in ("BYTES", "STEP_S", "COPIES"))
TENSORS = 16


class Beside(nn.Module):
    """The network of the recovery bench; each step uses one row of each frozen table."""

    def __init__(self, frozen_bytes: int) -> None:
        super().__init__()
        self.small = network.build()
        rows = frozen_bytes // TENSORS // network.WIDTH // 4
        tables = (torch.full((rows, network.WIDTH), 1e-3) for _ in range(TENSORS if rows else 0))
        self.frozen = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in tables)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.small(sum((each[7] for each in self.frozen), inputs))
        return found


def _timed(path: str, rank: int) -> None:
    write = SnapshotWriter.write

    def timed(self: SnapshotWriter, *given: Any, **named: Any) -> float | None:
        cost_s = write(self, *given, **named)
        if cost_s is not None:
            with open(path, "a") as file:
                file.write(f"{rank} {self.was_read} {cost_s}\n")
        return cost_s

    setattr(SnapshotWriter, "write", timed)  # noqa: B010 - a method


def main() -> None:
    model = Beside(int(os.environ[BYTES]))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    session = holdfast.join()
    _timed(os.environ[COPIES], session.rank)
    replica = DistributedDataParallel(model)
    state = session.protect(model=model, optimizer=optimizer)
    ticker, step_s = Ticker(), float(os.environ[STEP_S])
    due = time.monotonic()
    for step in state.steps(network.STEPS):
        loss = network.train_step(replica, step, session.rank)
        due = max(due + step_s, time.monotonic())
        time.sleep(due - time.monotonic() if due > time.monotonic() else 0.0)
        optimizer.step()
        ticker.tick(step)
        optimizer.zero_grad()
        state.commit(loss=loss)


if __name__ == "__main__":
    main()
