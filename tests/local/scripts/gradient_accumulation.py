"""Gradients are accumulated over two passes, or three in every tenth step; dropout draws in each pass.

python gradient_accumulation.py FOLDER. Rank 1 is killed once, after the optimizer's write of such a step and
after its peer's commit, if FOLDER has a file `kill`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from tiny_model import once
from torch import nn

import holdfast

folder = Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
session = holdfast.join()
rank = session.rank
replica = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(rank)
state = session.protect(model=model, optimizer=optimizer)
for step in state.steps(30):
    passes = 3 if step % 10 == 9 else 2
    optimizer.zero_grad()
    for _ in range(passes):
        ((replica(torch.randn(8, 8)) - 1).square().mean() / passes).backward()
    optimizer.step()
    if step == 9 and rank == 1 and (folder / "kill").exists() and once(folder / "killed"):
        while not (folder / "committed").exists():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    state.commit()
    if step == 9 and rank == 0:
        (folder / "committed").touch()
parts = [*(p.detach() for p in model.parameters()), torch.get_rng_state()]
digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts]
(folder / f"result.{rank}").write_text(json.dumps(digests))
