"""Record which GPUs each rank sees: python SCRIPT FOLDER [uses]. `uses` makes it use one before `join`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tiny_model import train

import holdfast
from holdfast.process import gpu_assignment

folder, uses = Path(sys.argv[1]), len(sys.argv) > 2
if uses:
    held = (folder / "nvidia-uvm").open("a")  # CUDA keeps it open from its first call on
    gpu_assignment._driver_code = lambda: 0  # what CUDA's driver answers from then on; here, there is none


def note(step: int, state: object) -> None:
    if step % 10 == 0:
        rank, generation = os.environ["RANK"], os.environ["HOLDFAST_GENERATION"]
        written = folder / f"writing-{rank}"
        written.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        written.replace(folder / f"{generation}-{rank}")  # so that the test never reads an empty file


assert holdfast.local_rank() == 0
train(10_000_000, after=note)
