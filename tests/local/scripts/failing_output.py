"""Train 20 steps; then what one of the ranks prints cannot be written: python failing_output.py RANK."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_model import train

import holdfast

train(20)
if holdfast.join().rank == int(sys.argv[1]):
    sys.stdout = Path("/dev/full").open("w")
    print("a last word")
