"""Rank 0 saves between the optimizer and the commit of a step: python SCRIPT FOLDER plain|pause.

It creates `begun` when the work begins, and adds a line to `times` each time that it begins.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

from tiny_model import train

STEP = 20
LINES = 40
folder, what = Path(sys.argv[1]), sys.argv[2]
pause = threading.Event()
states: list[Any] = []


def before_commit(step: int, rank: int) -> None:
    if step != STEP or rank != 0:
        return
    with states[0].pause("checkpoint") if what == "pause" else contextlib.nullcontext():
        with (folder / "times").open("a") as file:
            print("begins", file=file)
        (folder / "begun").touch()
        with (folder / "model.txt").open("w") as file:
            for number in range(LINES):
                print(number, file=file, flush=True)
                pause.wait(0.1)


train(60, before_commit=before_commit, protected=states.append, digest=folder / "digest")
