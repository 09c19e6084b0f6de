"""Code that these loops share: python SCRIPT STEPS DIGEST QUIET ...

Each loop follows a practice of real training scripts. Until the file QUIET exists, each step pauses at one of
several places, which take turns, so that a fault hits a rank anywhere. At its end, each rank writes a hash of
its state to DIGEST.RANK.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

PACE_S = 0.04
PLACES = 4

torch.manual_seed(0)


class Loop:
    """A rank that has joined."""

    def __init__(self) -> None:
        self.session = holdfast.join()
        self.count = int(sys.argv[1])
        self._digest, self._quiet = Path(sys.argv[2]), Path(sys.argv[3])
        self._pause = threading.Event()
        self._step = 0
        torch.manual_seed(self.session.rank)
        random.seed(self.session.rank)

    def spread(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module, **options)

    def protect(self, **objects: Any) -> Any:
        self.state = self.session.protect(**objects)
        return self.state

    def steps(self, count: int | None = None) -> Iterator[int]:
        for step in self.state.steps(self.count if count is None else count):
            self._step = step
            self.rest(0)
            yield step

    def rest(self, place: int, pace_s: float = PACE_S) -> None:
        """Pause if it is this place's turn."""
        if self._step % PLACES == place and not self._quiet.exists():
            self._pause.wait(pace_s)

    def batch(self, step: int, width: int = 8, part: int = 0) -> Tensor:
        """Return this rank's batch of a step."""
        generator = torch.Generator().manual_seed(10_000 * step + 10 * self.session.rank + part)
        return torch.randn(6, width, generator=generator)

    def finish(self, **parts: Any) -> None:
        """Write a hash of `parts` and the random states, atomically."""
        parts["random"] = [torch.get_rng_state(), random.getstate()]
        found = {name: hashed(part) for name, part in parts.items()}
        path = self._digest.with_name(f"{self._digest.name}.{self.session.rank}")
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(json.dumps(found))
        os.replace(scratch, path)


def hashed(tree: Any) -> str:
    total = hashlib.sha256()
    for line in described("", tree):
        total.update(line.encode())
    return total.hexdigest()


def described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().view(-1)
        content = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
        yield f"{name} {value.dtype} {tuple(value.shape)} {content.hex()}\n"
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from described(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for n, each in enumerate(value):
            yield from described(f"{name}.{n}", each)
    else:
        yield f"{name} {value!r}\n"


def net(width: int = 8, hidden: int = 16, out: int = 4) -> nn.Sequential:
    """Return a model with buffers (batch norm) and random draws (dropout)."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, out)
    )
