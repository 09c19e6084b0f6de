"""Print while it trains: python chatty.py STEPS LINES."""

from __future__ import annotations

import sys

from tiny import train

LINE = "x" * 99
steps, lines = map(int, sys.argv[1:])

train(steps, before_commit=lambda step, rank: print("\n".join([f"{rank} {step} {LINE}"] * lines)))
