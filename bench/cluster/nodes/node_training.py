"""The script that `python -m bench cluster-nodes` trains in pods, under Holdfast and undisturbed.

It is mounted in the pods from a ConfigMap, so it can import only torch and holdfast. Each rank draws its
batches from its own random state, so the weights are right only if the private states of all ranks are. Each
rank prints every step that it has completed. Rank 0 prints a digest of the weights at regular steps, so runs
of different lengths can be compared.

The training ends at the first of these steps at which rank 0 finds the file `FINISH`, or at `HOLDFAST_STEPS`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

FINISH = Path("/tmp/finish")
DIGEST_EVERY = 50
MOST_STEPS = 10_000_000


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    pace_s = float(os.environ["HOLDFAST_PACE"])
    last = int(os.environ.get("HOLDFAST_STEPS", MOST_STEPS)) - 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.join()
    torch.manual_seed(1 + session.rank)
    replica = DistributedDataParallel(model)
    state = session.protect(model=model, optimizer=optimizer)
    for step in state.steps(MOST_STEPS):
        inputs = torch.randn(8, 64)
        loss = replica(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit(loss=loss)
        say(f"tick {step} rank {session.rank} generation {session.generation}")
        if step % DIGEST_EVERY == DIGEST_EVERY - 1:
            if session.rank == 0:
                say(f"digest {step} {digest(model)}")
            is_last = torch.tensor([float(step >= last or FINISH.exists())])
            dist.broadcast(is_last, src=0)
            if is_last.item():
                break
        time.sleep(pace_s)


if __name__ == "__main__":
    main()
