"""Do one habit in the first step after each restart: python first_steps.py FOLDER HABIT...

The next habit is the first that has not left a file of its name in the folder.
"""

from __future__ import annotations

import importlib
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import habits
import torch.distributed as dist
from habits import PACE_S, SECONDS, Training


def compile_workers(here: Training) -> None:
    """Wait for the results of worker processes, as torch.compile does."""
    if here.rank == 0:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            list(pool.map(_compute, [SECONDS / 2] * 2))
            time.sleep(SECONDS / 2)


def _compute(seconds: float) -> None:
    habits.busy(seconds, lambda: None)


def slow_import(here: Training) -> None:
    if here.rank == 0:
        module = here.folder / "slow_module.py"
        module.write_text(f"import time\ntime.sleep({SECONDS})\n")
        sys.path.insert(0, str(here.folder))
        importlib.import_module("slow_module")


def new_group(here: Training) -> None:
    """Wait for a late rank in the store, as when communicators are created."""
    if here.rank == 0:
        time.sleep(SECONDS)
    dist.barrier(dist.new_group([0, 1], timeout=timedelta(seconds=60 + SECONDS)))


def terminal(here: Training) -> None:
    """Wait for a line of input, as input() and debuggers do."""
    habits.stalled_file(here)


OWN = {"compile_workers": compile_workers, "slow_import": slow_import, "new_group": new_group}
OWN |= {"terminal": terminal}


def main() -> None:
    here, names = Training(Path(sys.argv[1])), sys.argv[2:]
    name = next((each for each in names if not (here.folder / each).exists()), "")
    first = True
    for step in here.state.steps(10**9):
        if first and step > 0 and name:
            began = time.monotonic()
            (OWN.get(name) or getattr(habits, name))(here)
            if here.rank == 0:
                habits.leave(here, name, time.monotonic() - began)
        first = False
        time.sleep(PACE_S)
        loss = here.loss()
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.state.commit(loss=loss)


if __name__ == "__main__":
    main()
