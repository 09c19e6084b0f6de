"""Train a throwaway model in a warm process, so that a recovery is not delayed by lazy initialisation."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rehearse(device: torch.device) -> None:
    """Form a group of one rank, train a tiny model in it for two steps, and destroy the group.

    On return, the process has done the one-time work of a step: starting autograd's threads, building the
    reducer, importing the compiler (which the optimizer does), and setting up kernels. The random generators
    and the exception hook are unchanged.
    """
    import torch
    import torch.distributed as dist

    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state(legacy=False) if numpy is not None else None
    on_gpu, hook = device.type == "cuda", sys.excepthook
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            _train(device)
        finally:
            dist.destroy_process_group()
    finally:
        sys.excepthook = hook  # torch has replaced it with its own hook, which would call this process rank 0
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _train(device: torch.device) -> None:
    import torch
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        layers = (torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
        model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
        optimizer = torch.optim.AdamW(model.parameters())
        target = torch.zeros(4, dtype=torch.long, device=device)
        for _ in range(2):
            loss = functional.cross_entropy(model(torch.randn(4, 32, device=device)), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
