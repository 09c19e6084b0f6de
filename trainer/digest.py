"""Compute a digest of the training state, to compare two runs bit for bit.

Two states have the same digest if and only if the names, types, shapes and bytes of all tensors, the
optimizer's settings and the random states are equal. Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.options import PRINTED
from trainer.repeatable import numpy_if_installed

if TYPE_CHECKING:
    from hashlib import _Hash

PARTS = ("parameters", "buffers", "optimizer", "rng")
DIGEST_BYTES = 32


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the SHA-256 of each of `PARTS` of this process's state, in hex."""
    device = next(model.parameters()).device
    return {
        "parameters": _tensors(model.named_parameters()),
        "buffers": _tensors(model.named_buffers()),
        "optimizer": _optimizer(optimizer),
        "rng": _random_states(device),
    }


def combined(parts: dict[str, str]) -> str:
    """Return a single digest of all parts."""
    return hashlib.sha256("".join(parts[name] for name in PARTS).encode()).hexdigest()


def report(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, path: Path | None
) -> None:
    """Print `digest <hex>` of rank 0's state. If `path` is given, write all ranks' digests to it.

    If the path is `-`, print them as `digests <JSON>`, because a pod's files no longer exist after it ends.
    This is a collective: all ranks must call it.
    """
    ranks = gather(digests(model, optimizer), device)
    if dist.get_rank() == 0:
        if path == PRINTED:
            print("digests", json.dumps(_table(ranks)), flush=True)  # noqa: T201 - the trainer's result
        elif path is not None:
            write(path, ranks)
        print("digest", combined(ranks[0]), flush=True)  # noqa: T201 - the trainer's result


def gather(parts: dict[str, str], device: torch.device) -> list[dict[str, str]]:
    """Return the digests of each rank's parts, by rank. This is a collective: all ranks must call it."""
    text = "".join(parts[name] for name in PARTS)
    row = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    rows = [torch.empty_like(row, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row.to(device))
    texts = [bytes(row.tolist()) for row in rows]
    return [
        {name: text[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES].hex() for at, name in enumerate(PARTS)}
        for text in texts
    ]


def write(path: Path, ranks: Sequence[dict[str, str]]) -> None:
    """Write the digests of each rank's parts, and the combined digests, to `path` atomically, as JSON."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(_table(ranks), indent=1) + "\n")
    scratch.replace(path)


def _table(ranks: Sequence[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {str(rank): {**parts, "all": combined(parts)} for rank, parts in enumerate(ranks)}


def _tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in named:
        _add(total, name, tensor)
    return total.hexdigest()


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the optimizer's settings and its state, in the order of its parameters."""
    total = hashlib.sha256()
    for at, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() - {"params"}):
            _add(total, f"{at}.{key}", group[key])
        for index, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                _add(total, f"{at}.{index}.{key}", state[key])
    return total.hexdigest()


def _random_states(device: torch.device) -> str:
    total = hashlib.sha256(repr(random.getstate()).encode())
    numpy = numpy_if_installed()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        total.update(repr((name, keys.tolist(), rest)).encode())
    _add(total, "cpu", torch.get_rng_state())
    if device.type == "cuda":
        _add(total, "cuda", torch.cuda.get_rng_state(device))
    return total.hexdigest()


def _add(total: _Hash, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        total.update(f"{name} {value!r}\n".encode())
        return
    tensor = value.detach().cpu().contiguous()
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    if tensor.nbytes:  # read the memory directly, which works for every type and needs no NumPy
        total.update((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
