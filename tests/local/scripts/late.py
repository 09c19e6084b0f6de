"""Randomness is drawn between the optimizer's write and the commit: python late.py STEPS DIGEST."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny import train

train(int(sys.argv[1]), before_commit=lambda *_: torch.rand(1), digest=Path(sys.argv[2]))
