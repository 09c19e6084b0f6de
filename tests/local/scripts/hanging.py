"""Train until the test requests a hang by a file named HOW-RANK in the folder argv[1].

Each rank has an idle worker of a data loader that has sent tensors, as in almost every script. Such a worker
waits in several system calls, and must not be taken for work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
from tiny_model import Sampler, train
from torch.utils.data import DataLoader, TensorDataset

POLLS = "import os, time\nwhile not os.path.exists('/nonexistent'): time.sleep(0.2)"
folder = Path(sys.argv[1])
loaders = []


def asked(how: str, rank: int) -> bool:
    try:
        (folder / f"{how}-{rank}").unlink()
    except FileNotFoundError:
        return False
    return True


def read_batch(_step: int, sampler: Sampler) -> torch.Tensor:
    """Read from a loader whose other end never sends anything."""
    if not loaders:
        loaders.append(iter(DataLoader(TensorDataset(torch.zeros(100, 4)), num_workers=1)))
        next(loaders[0])
    if asked("poller", sampler.rank):
        read_beside_poller()
    if asked("loader", sampler.rank):
        os.read(os.pipe()[0], 1)
    return sampler.batch()


def read_beside_poller() -> None:
    subprocess.Popen([sys.executable, "-c", POLLS])
    os.read(os.pipe()[0], 1)


def loss_of(_step: int, rank: int, output: torch.Tensor) -> torch.Tensor:
    """Spin, or wait for a lock instead of entering the collective of the backward pass, if requested."""
    while asked("spin", rank):
        spin()
    if asked("absent", rank):
        threading.Event().wait()
    if asked("lock", rank):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    return output.pow(2).mean()


def spin() -> None:
    count = 0
    while True:
        count += 1


train(10_000_000, data=read_batch, loss_of=loss_of, pace_s=0.01)
