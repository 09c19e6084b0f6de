"""Train 20 steps; then the output of one rank cannot be written: python failing_output.py RANK."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_model import train

import holdfast

train(20)
if holdfast.join().rank == int(sys.argv[1]):
    sys.stdout = Path("/dev/full").open("w")
    print("a last word")
