"""Change protected state after commits: python changes_after_commit.py FOLDER WHAT [hold].

WHAT is one of the words below. It determines what changes after the evaluation that follows every 20th (or
8th, 32nd, 64th) commit. `often`, `first`, `second`, `each` and `quick` step a scheduler after every commit;
with all of them but `often`, one rank also changes its private state. `always` changes the private state of
rank 0 after every commit.
A rank creates `begun.RANK` when the evaluation of step SHOWN begins, and writes its result to `result.RANK`.
With `hold`, it waits in step HELD the first time that it reaches it.

shared, both, average, often, first, second, each, quick, always
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
from tiny_model import once
from torch import nn
from torch.optim.swa_utils import AveragedModel

import holdfast

LONE = ("first", "second", "each", "quick")
folder, what = Path(sys.argv[1]), sys.argv[2]
BOUNDARY, SHOWN, HELD, STEPS = (32, 32, 44, 90) if what in LONE else (20, 40, 45, 90)
PACE_S = 0.005
if what == "each":
    BOUNDARY, SHOWN, HELD, STEPS, PACE_S = 64, 64, 232, 250, 0.02
if what == "quick":
    BOUNDARY, SHOWN, HELD, STEPS, PACE_S = 8, -1, 24, 60, 0.001
if what == "always":
    BOUNDARY, HELD, STEPS = 1, 130, 140
often = what in ("often", *LONE)
pause = threading.Event()


class Best:
    """The best measurements, private to a rank."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.steps = list(state["steps"])


torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
every = 1 if often else BOUNDARY
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.97 if often else 0.5)
best, average = Best(), AveragedModel(model)
session = holdfast.join()
replica = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(session.rank)
state = session.protect(model=model, optimizer=optimizer, scheduler=scheduler, best=best, average=average)
for _ in state.steps(STEPS):
    if state.step == HELD and "hold" in sys.argv and once(folder / f"held.{session.rank}"):
        pause.wait(60)
    inputs = torch.randn(4, 8)
    loss = (replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pause.wait(PACE_S)
    state.commit(loss=loss)
    if state.step % BOUNDARY == 0:
        with state.pause("eval"):
            if state.step == SHOWN:
                (folder / f"begun.{session.rank}").touch()
                pause.wait(1.5)  # a busy test has to find the rank while it evaluates
        alone = what in LONE and session.rank == LONE.index(what) % 2
        if what == "both" or alone or (what == "always" and session.rank == 0):
            best.steps.append(state.step)
        if what == "average":
            average.update_parameters(model)
    if state.step % every == 0 and (often or what in ("shared", "both")):
        scheduler.step()

found = [optimizer.param_groups[0]["lr"], best.steps, scheduler.last_epoch, int(average.n_averaged)]
weights = [each.flatten().tolist() for each in (*model.parameters(), *average.parameters())]
(folder / f"result.{session.rank}").write_text(json.dumps([found, weights]))
