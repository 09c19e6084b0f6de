"""Spoil the loss of rank 1: python bad_loss.py STEPS WHAT@STEP[,...] MARKERS.

WHAT is nan, inf, jump, or gradient (with a good loss). With an exclamation mark, it happens each time that
the step is trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_model import once, train

VALUES = {"nan": float("nan"), "inf": float("inf"), "jump": 1e6}
wanted = {int(step): what for what, step in (each.split("@") for each in sys.argv[2].split(","))}
markers = Path(sys.argv[3])


def loss_of(step: int, rank: int, output: torch.Tensor) -> torch.Tensor:
    loss = output.pow(2).mean()
    what = wanted.get(step, "")
    if not what or rank != 1:
        return loss
    if what == "gradient":
        if once(markers / f"{what}-{step}"):
            output.register_hook(lambda grad: grad * float("nan"))
        return loss
    if what.endswith("!") or once(markers / f"{what}-{step}"):
        return loss * VALUES[what.rstrip("!")]
    return loss


train(int(sys.argv[1]), loss_of=loss_of)
