"""Randomness is drawn between the optimizer's write and the commit: python late.py STEPS DIGEST."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from tiny import Sampler, train

pause = threading.Event()


def data(_step: int, sampler: Sampler) -> torch.Tensor:
    pause.wait(0.002)
    return sampler.batch()


train(int(sys.argv[1]), data=data, before_commit=lambda *_: torch.rand(1), digest=Path(sys.argv[2]))
