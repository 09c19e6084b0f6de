"""Exit with the script's own code when training fails, as many scripts do. Rank 1 is killed once, in step 7.

python exits_with_code.py FOLDER exit|raise
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from tiny_model import Sampler, once, train

folder, how = Path(sys.argv[1]), sys.argv[2]


class Failed(Exception):
    """The script's own exception for any failure."""


def data(step: int, sampler: Sampler) -> torch.Tensor:
    if step == 7 and sampler.rank == 1 and once(folder / "died"):
        os.kill(os.getpid(), signal.SIGKILL)
    return sampler.batch()


try:
    train(50, data=data)
except Exception as error:
    if how == "exit":
        sys.exit(f"training failed: {error}")
    raise Failed("training failed") from None
