"""Train in a group of changing size: python resizing.py SAMPLES EPOCHS FOLDER HOW.

It records each step before the gradients are exchanged, and each commit.

HOW is what the script does about the size: "batches" (it uses Batches), "hook" (it also has a hook), or
"nothing" (each rank has its own sampler). A process that starts while FOLDER/closed exists waits before it
joins, as in a pod that takes long to start.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from tiny_model import Sampler, write_digest
from torch import nn

import holdfast


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), index / self.size)


def main() -> None:
    samples, epochs, folder, how = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    while (folder / "closed").exists():
        time.sleep(0.05)
    session = holdfast.join()
    torch.manual_seed(session.rank)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = Sampler(session.rank)
    own = {} if how == "batches" else {"sampler": sampler}
    state = session.protect(model=model, optimizer=optimizer, **own)
    record = (folder / f"steps-{session.generation}-{session.rank}").open("w", buffering=1)
    commits = (folder / f"commits-{session.generation}-{session.rank}").open("w", buffering=1)

    if how == "hook":

        @session.on_resize
        def adapt(old: int, new: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= new / old
            sampler.drawn = state.step * session.world_size
            (folder / f"resized-{session.generation}-{session.rank}").write_text(
                f"{old} {new} {session.resized}"
            )

    batches = holdfast.Batches(Numbers(samples), 2, session, state, drop_last=False)
    for step, batch in batches.steps(batches.first_step(epochs)):
        if how != "batches":
            sampler.batch()
        loss = model(batch).pow(2).mean()
        place = [session.generation, step, batches.epoch(step), session.world_size]
        # before the gradients are exchanged: no rank can commit the step until all have written this
        record.write(json.dumps([*place, optimizer.param_groups[0]["lr"], batches.indices(step)]) + "\n")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit(loss=loss, position=batches.position(step))
        commits.write(f"{step}\n")
        time.sleep(0.01)  # a run lasts longer than a busy test takes to notice a step
    write_digest(folder / f"digest.{session.rank}", module, optimizer)


if __name__ == "__main__":
    main()
