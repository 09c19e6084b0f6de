"""Accumulate gradients: run several forward and backward passes for one optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def accumulate(
    replica: DistributedDataParallel, passes: Tensor, loss_on: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run one pass for each row of `passes`; return this rank's mean loss, on its device.

    On return, the parameters have the gradients of the mean loss over all passes and ranks.
    """
    total = torch.zeros((), device=replica.device)
    last = len(passes) - 1
    for number, samples in enumerate(passes):
        alone = replica.no_sync() if number < last else contextlib.nullcontext()
        with alone:  # the ranks average their gradients only once, in the last pass
            loss = loss_on(samples) / len(passes)
            loss.backward()
        total += loss.detach()
    return total


def autocast(device: torch.device, bf16: bool | None) -> torch.autocast:
    """Return the context for computing a loss.

    If `bf16` is None, bfloat16 is used only on a GPU that supports it. A CPU without matrix units for
    bfloat16 computes more slowly in bfloat16 than in float32.
    """
    if bf16 is None:
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)
