"""Rank 1 stays inside the optimizer's writes while FILE exists: python stays_in_write.py FILE."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from tiny_model import train

file = Path(sys.argv[1])
pause = threading.Event()


def prepare(optimizer: torch.optim.Optimizer, rank: int) -> None:
    def linger(*_: object) -> None:
        if file.exists():
            Path(f"{file}.inside").touch()
        while file.exists():
            pause.wait(0.01)

    if rank == 1:
        optimizer.register_step_post_hook(linger)


train(10_000_000, prepare=prepare)
