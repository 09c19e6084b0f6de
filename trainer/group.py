"""Helpers for two peculiarities of DDP and torch's process group."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def settle(replica: DistributedDataParallel, inputs: Tensor) -> None:
    """Run a throwaway backward pass, so that gradients are added in the same order in every later step.

    After its first backward pass, DDP rearranges its buckets in the order in which gradients became ready.
    The arrangement determines the order in which the ranks' gradients are added. The first step of a process
    therefore rounds differently from later steps, and a resumed run would not be bit-identical to an
    uninterrupted run. With two ranks only one order is possible, so this does nothing.

    The pass runs in evaluation mode, so it draws no random numbers and changes no buffers. A collective.
    """
    if dist.get_world_size() < 3:
        return
    replica.eval()
    replica(inputs).sum().backward()
    replica.zero_grad()
    replica.train()


def leave() -> None:
    """Destroy the process group. Call this once no `DistributedDataParallel` is in use.

    A replica that outlives its group ends the group's threads while it holds the interpreter lock, for which
    those threads may be waiting. About one process in a hundred then hangs, or aborts if the interpreter is
    exiting (torch 2.13, gloo). A garbage collection therefore first frees replicas in reference cycles.
    """
    gc.collect()
    dist.destroy_process_group()
