"""Ranks that wait for each other: python SCRIPT FOLDER; files HOW-RANK in it select what happens.

`apart` and `paused` are bugs: only one rank enters a barrier of an evaluation. `tries` is not a bug: because
of a time limit, a rank notices that no other rank joins it, and continues. `chain` is not a bug either. It
needs three ranks, and its file name contains no rank: rank 0 waits for rank 1, which waits for rank 2, which
waits for the process that writes into the pipe. `slow` is a step that takes long.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_model import train

folder = Path(sys.argv[1])
SLOW_S = 8.0
TRIES_S = float(os.environ.get("TRIES_S", "8"))
groups: list[Any] = []  # of neighbours, and of all
impatient: list[Any] = []


def prepare(_optimizer: torch.optim.Optimizer, _rank: int) -> None:
    size = dist.get_world_size()
    groups.extend(dist.new_group([rank, rank + 1]) for rank in range(size - 1))
    groups.append(dist.new_group())
    impatient.append(dist.new_group(timeout=timedelta(seconds=TRIES_S)))


def asked(how: str) -> bool:
    try:
        (folder / f"{how}-{dist.get_rank()}").unlink()
    except FileNotFoundError:
        return False
    return True


def evaluate() -> None:
    dist.barrier(groups[-1])


def tries() -> None:
    try:
        dist.barrier(impatient[0])
    except RuntimeError:
        (folder / "tried").touch()


def chain() -> None:
    rank = dist.get_rank()
    if rank == 2:
        with (folder / "pipe").open("rb") as pipe:
            assert os.read(pipe.fileno(), 1) == b"x"
    for group in (rank, rank - 1):  # the later neighbour first
        if 0 <= group < len(groups) - 1:
            dist.all_reduce(torch.ones(1), group=groups[group])


def before_commit(_step: int, _rank: int) -> None:
    if asked("slow"):
        time.sleep(SLOW_S)


def after(step: int, state: Any) -> None:
    if asked("apart"):
        evaluate()
    if asked("paused"):
        with state.pause("eval"):
            evaluate()
    if asked("tries"):
        tries()
    if step == 60 and (folder / "chain").exists():
        chain()
    if step == 60:
        (folder / f"done-{dist.get_rank()}").touch()


train(10_000_000, prepare=prepare, before_commit=before_commit, after=after, pace_s=0.01)
