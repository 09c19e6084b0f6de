"""Not a hang: a slow first step, steps that vary by 5x, an eval of 50 steps, a checkpoint of 20."""

from __future__ import annotations

import random
import sys
import threading

import torch
from tiny_model import Sampler, train

STEP_S = 0.02
pause = threading.Event()
times = random.Random(7)


def data(step: int, sampler: Sampler) -> torch.Tensor:
    pause.wait(3.0 if step == 0 else times.uniform(STEP_S / 2.5, STEP_S * 2))
    return sampler.batch()


def after(step: int, state: object) -> None:
    for every, label, length in ((80, "eval", 50), (60, "checkpoint", 20)):
        if step and step % every == 0:
            with state.pause(label):  # type: ignore[attr-defined]
                pause.wait(length * STEP_S)


train(int(sys.argv[1]), data=data, after=after, pace_s=0)
