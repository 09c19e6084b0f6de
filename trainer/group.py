"""Work around two quirks of DDP and torch's process group."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def settle(replica: DistributedDataParallel, inputs: Tensor) -> None:
    """Run a throwaway backward pass, to make all later steps add up gradients in the same order.

    After its first backward pass, DDP rearranges its buckets into the order of the gradients' arrival.
    The arrangement determines in what order DDP adds up the ranks' gradients. The first step of a
    process would therefore round differently from later steps, and a resumed run would not be bit-identical
    to an uninterrupted run. With two ranks, only one order is possible, so this does nothing.

    The pass runs in evaluation mode, so it draws no random numbers and changes no buffers. This is a
    collective: all ranks must call it.
    """
    if dist.get_world_size() < 3:
        return
    replica.eval()
    replica(inputs).sum().backward()
    replica.zero_grad()
    replica.train()


def leave() -> None:
    """Destroy the process group. Call this once no `DistributedDataParallel` is in use.

    If a replica outlives its group, its destructor ends the group's threads while holding the interpreter
    lock, which those threads may be waiting for. About one process in a hundred then hangs, or aborts if the
    interpreter is exiting (torch 2.13, gloo). So this first runs a garbage collection, which frees replicas
    in reference cycles.
    """
    gc.collect()
    dist.destroy_process_group()
