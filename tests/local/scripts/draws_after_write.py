"""Draw random numbers between the optimizer's write and the commit: python SCRIPT STEPS DIGEST."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_model import train

# The pace keeps a run from ending before a busy test has noticed a step and killed a rank.
train(int(sys.argv[1]), pace_s=0.02, before_commit=lambda *_: torch.rand(1), digest=Path(sys.argv[2]))
