"""Rank 0 has work after a commit.

python work_after_commit.py FOLDER save|beside|joined|raise|raise-once|interrupt|hang-up|meet|die SECONDS

With `die`, it is killed once, SECONDS into a pause in which it saves. With `hang-up`, its connection is reset
once in that pause. With `meet`, all ranks pass a barrier before it saves in the pause, and rank 1 is killed
once before the barrier. With `joined` and `beside`, a thread saves. The thread is joined in a pause, or not
at all. Rank 0 creates `begun` when the work begins, and adds a line to `times` each time that it begins.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tiny_model import once, train

STEP = 20
LINES = 40
folder, what = Path(sys.argv[1]), sys.argv[2]
pause = threading.Event()


def save() -> None:
    with (folder / "model.txt").open("w") as file:
        for number in range(LINES):
            print(number, file=file, flush=True)
            pause.wait(0.05)


def met(state: Any) -> None:
    if dist.get_rank() == 1 and not (folder / "died").exists():
        while not (folder / "begun").exists():
            pause.wait(0.01)
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with state.pause("checkpoint"):
        if dist.get_rank() == 0:
            begins()
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "model.txt").write_text("saved\n")
        dist.barrier()


def begins() -> None:
    with (folder / "times").open("a") as file:
        print("begins", file=file)
    (folder / "begun").touch()


def after(step: int, state: Any) -> None:
    if state.step == STEP and what == "meet":
        met(state)
    elif state.step == STEP and dist.get_rank() == 0:
        alone(state)


def alone(state: Any) -> None:
    begins()
    if what == "save":
        save()
    elif what in ("beside", "joined"):
        thread = threading.Thread(target=save)
        thread.start()
        if what == "joined":
            with state.pause("save"):
                thread.join()
    elif what == "die":
        with state.pause("checkpoint"):
            pause.wait(float(sys.argv[3]))
            if once(folder / "died"):
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "model.txt").write_text("saved\n")
    elif what == "hang-up":
        with state.pause("checkpoint"):
            if once(folder / "hung-up"):
                raise ConnectionResetError(104, "Connection reset by peer")
            (folder / "model.txt").write_text("saved\n")
    elif what == "interrupt":
        raise KeyboardInterrupt
    elif what == "raise" or once(folder / "raised"):
        with state.pause("eval"):
            raise RuntimeError("the evaluation failed")


train(60, after=after, digest=folder / "digest")
