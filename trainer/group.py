"""Two things about torch's process group that a training script has to know."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def settle(replica: DistributedDataParallel, inputs: Tensor) -> None:
    """Run a throw-away backward pass, so that gradients are summed in one order from here on.

    After its first backward pass DDP lays its buckets out anew, in the order in which gradients
    became ready, and the layout decides in which order the ranks' gradients are added. So a step
    that is the first of its process ends in other last bits than if it had been a later one, and a
    resumed run would leave the run it continues. With two ranks there is one order, and nothing to do.

    The pass is in evaluation mode: it draws no random number and changes no buffer. A collective.
    """
    if dist.get_world_size() < 3:
        return
    replica.eval()
    replica(inputs).sum().backward()
    replica.zero_grad()
    replica.train()


def leave() -> None:
    """Take the process group down. Call it when no `DistributedDataParallel` is in use any more.

    A replica that outlives its group takes the group's threads down itself, while it holds the
    interpreter's lock that those threads may wait for: one end of a process in a hundred hangs, or
    aborts if the interpreter is ending (torch 2.13, gloo). The collector finds replicas in cycles.
    """
    gc.collect()
    dist.destroy_process_group()
