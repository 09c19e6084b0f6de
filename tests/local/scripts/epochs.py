"""Epochs over augmented data, loaded by workers: python epochs.py STEPS fork|spawn|none DIGEST [LOOP].

LOOP: steps (of the batches), or zip or piz (with the state's; every seventh step is begun twice).
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from tiny_model import write_digest
from torch import nn

import holdfast


class Noisy:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), index / 200) + 0.1 * torch.randn(32) + random.random()


def main() -> None:
    steps, method, digest = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    loop = sys.argv[4] if len(sys.argv) > 4 else "steps"
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    )
    session = holdfast.join()
    torch.manual_seed(session.rank)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = session.protect(model=model, optimizer=optimizer)
    workers = {} if method == "none" else {"num_workers": 2, "multiprocessing_context": method}
    batches = holdfast.Batches(Noisy(), 8, session, state, **workers)
    loops = {
        "steps": lambda: batches.steps(steps),
        "zip": lambda: zip(state.steps(steps), batches, strict=False),
        "piz": lambda: ((step, batch) for batch, step in zip(batches, state.steps(steps), strict=False)),
    }
    twice = -1
    for step, batch in loops[loop]():
        if loop != "steps" and step % 7 == 3 and step != twice:
            twice = step
            continue
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit(loss=loss, position=batches.position(step))
        time.sleep(0.02)  # a run lasts longer than a busy test takes to notice a step
    write_digest(digest.with_name(f"{digest.name}.{session.rank}"), module, optimizer)


if __name__ == "__main__":
    main()
