"""A state whose copy takes 1.2 s, like a state of gigabytes: python slow_copy.py STEPS."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from tiny_model import train

from holdfast.snapshot.tensor_copy import ParallelCopy

COPY_S = 1.2
run, pause = ParallelCopy.run, threading.Event()


def slow(copying: ParallelCopy, moved: Callable[[], None]) -> None:
    pause.wait(COPY_S)
    run(copying, moved)


ParallelCopy.run = slow
train(int(sys.argv[1]))
