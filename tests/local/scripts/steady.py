"""Train and do nothing else: python steady.py STEPS [WIDTH [PACE_MS [DIGEST]]]."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_model import train

words = [*sys.argv[1:], *["64", "20", ""][len(sys.argv) - 2 :]]
train(
    int(words[0]),
    width=int(words[1]),
    pace_s=int(words[2]) / 1000,
    digest=Path(words[3]) if words[3] else None,
)
