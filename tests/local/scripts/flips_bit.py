"""Spoil a bit of one rank's parameters once: python flips_bit.py STEPS RANK STEP MARKER DIGEST.

It trains for STEPS until the bit is found. After the rollback, it trains for a few more steps than STEP.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch
from tiny_model import once, train

steps, liar, spoilt, marker, digest = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    int(sys.argv[3]),
    *map(Path, sys.argv[4:]),
)
weights: list[torch.Tensor] = []
pause = threading.Event()


def keep(optimizer: torch.optim.Optimizer, _rank: int) -> None:
    weights.append(optimizer.param_groups[0]["params"][0])


def spoil(step: int, rank: int) -> None:
    if rank == liar and step == spoilt and once(marker):
        with torch.no_grad():
            weights[0].view(-1)[7] += 1e-3


def found_out() -> bool:
    return os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"


def linger(*_: object) -> None:
    """Slow the steps down until the bit is found."""
    pause.wait(0.0 if found_out() else 0.003)


train(
    lambda: spoilt + 50 if found_out() else steps,
    pace_s=0,
    prepare=keep,
    before_commit=spoil,
    after=linger,
    digest=digest,
)
