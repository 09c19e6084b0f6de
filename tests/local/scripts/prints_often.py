"""Print while training: python prints_often.py STEPS LINES."""

from __future__ import annotations

import sys

from tiny_model import train

LINE = "x" * 99
steps, lines = map(int, sys.argv[1:])

train(steps, before_commit=lambda step, rank: print("\n".join([f"{rank} {step} {LINE}"] * lines)))
