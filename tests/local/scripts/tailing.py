"""Rank 0 has long work after a commit: python tailing.py FOLDER save|raise|raise-once|interrupt [RANK].

It leaves `begun` as soon as it is at that work, and a line in `times` each time that it begins.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from tiny import once, train

STEP = 20
LINES = 40
folder, what = Path(sys.argv[1]), sys.argv[2]
pause = threading.Event()


def save() -> None:
    with (folder / "model.txt").open("w") as file:
        for number in range(LINES):
            print(number, file=file, flush=True)
            pause.wait(0.05)


def after(step: int, state: Any) -> None:
    if state.step != STEP or state.session.rank != 0:
        return
    with (folder / "times").open("a") as file:
        print("begins", file=file)
    (folder / "begun").touch()
    if what == "save":
        save()
    elif what == "interrupt":
        raise KeyboardInterrupt
    elif what == "raise" or once(folder / "raised"):
        with state.pause("eval"):
            raise RuntimeError("the evaluation failed")


train(60, after=after, digest=folder / "digest")
