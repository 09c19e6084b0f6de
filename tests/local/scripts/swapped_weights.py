"""Weights are swapped in for an evaluation after steps 11, 23 and 35; rank 0's last one is long, once.

python swapped_weights.py FOLDER. During the long evaluation, it keeps adding lines to `evaluated`. It creates
`done` when an evaluation of step 35 has finished.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_model import once, train

folder = Path(sys.argv[1])
pause = threading.Event()
weights: list[torch.nn.Parameter] = []


def prepare(optimizer: torch.optim.Optimizer, _rank: int) -> None:
    weights.extend(p for group in optimizer.param_groups for p in group["params"])


def evaluate(rank: int, last: bool) -> None:
    pause.wait(0.1)  # long enough that the state before it is copied
    if last and rank == 0 and once(folder / "long"):
        with (folder / "evaluated").open("w") as file:
            while True:
                print("evaluating", file=file, flush=True)
                pause.wait(0.05)


@torch.no_grad()
def after(_step: int, state: Any) -> None:
    if state.step not in (11, 23, 35):
        return
    with state.pause("eval"):
        kept = [p.clone() for p in weights]
        for parameter in weights:
            parameter.add_(1)
        evaluate(dist.get_rank(), state.step == 35)
        for parameter, old in zip(weights, kept, strict=True):
            parameter.copy_(old)
    if state.step == 35 and dist.get_rank() == 0:
        (folder / "done").touch()


train(60, after=after, prepare=prepare)
