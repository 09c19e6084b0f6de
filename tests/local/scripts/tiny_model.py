"""Code that these scripts share: a model with steps of a millisecond, and state that is hard to resume."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast

PACE_S = 0.005  # pause in each step, because the other processes of a test also need the cores


class Sampler:
    """Batches in an order with a position, which is private to a rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.drawn = rank, 0

    def batch(self) -> Tensor:
        self.drawn += 1
        generator = torch.Generator().manual_seed(1000 * self.drawn + self.rank)
        return torch.randn(16, 32, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def model_of(width: int = 64) -> nn.Module:
    """Return a model with random draws (dropout) and buffers that differ from rank to rank (batch norm)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 8)
    )


def train(
    steps: int | Callable[[], int],
    *,
    width: int = 64,
    pace_s: float = PACE_S,
    data: Callable[[int, Sampler], Tensor] = lambda _, sampler: sampler.batch(),
    loss_of: Callable[[int, int, Tensor], Tensor] = lambda _step, _rank, output: output.pow(2).mean(),
    before_commit: Callable[[int, int], None] = lambda _step, _rank: None,
    after: Callable[[int, Any], None] = lambda _step, _state: None,
    prepare: Callable[[torch.optim.Optimizer, int], None] = lambda _optimizer, _rank: None,
    protected: Callable[[Any], object] = lambda _state: None,
    digest: Path | None = None,
) -> None:
    """Train for `steps`, a number or a function that is called after joining, with the caller's hooks.

    Each step pauses for `pace_s` at one of three places, which take turns, so that a fault hits a rank
    anywhere.
    """
    module = model_of(width)
    session = holdfast.join()
    torch.manual_seed(session.rank)
    model = nn.parallel.DistributedDataParallel(module.to(session.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepare(optimizer, session.rank)
    sampler = Sampler(session.rank)
    state = session.protect(model=model, optimizer=optimizer, sampler=sampler)
    protected(state)
    pause = threading.Event()

    def rest(step: int, place: int) -> None:
        if step % 3 == place:
            pause.wait(pace_s)

    for step in state.steps(steps if isinstance(steps, int) else steps()):
        rest(step, 0)
        loss = loss_of(step, session.rank, model(data(step, sampler)))
        rest(step, 1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # of all ranks, so a bad one shows on each
        optimizer.step()
        optimizer.zero_grad()
        rest(step, 2)
        before_commit(step, session.rank)
        state.commit(loss=loss, grad_norm=norm, samples=32, position=32 * step)
        after(step, state)
    if digest is not None:
        write_digest(digest.with_name(f"{digest.name}.{session.rank}"), module, optimizer)


def write_digest(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a hash of parameters, buffers, optimizer and random state, atomically."""
    parts = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "random": {"torch": torch.get_rng_state()},
    }
    found = {name: _hash(part) for name, part in parts.items()}
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(found))
    os.replace(scratch, path)


def _hash(tree: Any) -> str:
    total = hashlib.sha256()
    for name in sorted(tree, key=str):
        value = tree[name]
        if isinstance(value, dict):
            total.update(_hash(value).encode())
        else:
            total.update(f"{name} {torch.as_tensor(value).flatten().tolist()!r}".encode())
    return total.hexdigest()


def once(marker: Path) -> bool:
    """Return True in the first process that calls this."""
    try:
        marker.open("x").close()
    except FileExistsError:
        return False
    return True
