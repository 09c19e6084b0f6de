"""A training run on a real GPU whose state at every step is known; also used by tests/gpu."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.harness.memory_needs import MEMORY
from holdfast.fileio.safetensors import map_file
from holdfast.protocol import progress
from holdfast.protocol.launcher_messages import Launch, RankStart, SecureAnswer
from holdfast.protocol.progress_writer import Page
from holdfast.snapshot import member_directory
from holdfast.training.session import Session
from holdfast.training.state import State
from holdfast.worker.launcher_channel import LauncherChannel

GENERATION = 1
LAUNCH = Launch(GENERATION, 1, 1, "", 0, 0, 0.0)

GPU = torch.device("cuda", 0)

Bits = dict[str, bytes]


class Training:
    """A model with `width`^2 parameters per layer, and an AdamW whose step counters are on the host."""

    def __init__(
        self, folder: Path, width: int = 64, layers: int = 2, every: int = 0, wrap: Any = None
    ) -> None:
        control = socket.socket()
        control.close()  # as if the launcher had exited
        folder.mkdir(exist_ok=True)
        session = Session(
            replace(LAUNCH, snapshot_every=every), RankStart(0, 0), LauncherChannel(control, folder, 0, 1)
        )
        session._rank.page = Page.create(folder / member_directory.page_name(0))
        session._rank.page.begin(GENERATION, 0, 0, 1, 0)
        torch.manual_seed(3)
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(GPU)
        self.model: nn.Module = wrap(model) if wrap is not None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.width, self.folder = width, folder
        self.state: State = session.protect(model=self.model, optimizer=self.optimizer)
        # The loop of `run`. It is stored here because a step ends when its loop is discarded.
        self.loop: Iterator[int] = iter(())

    def steps(self, count: int) -> Iterator[int]:
        """Queue steps without waiting for the device; yield after each commit."""
        for step in self.state.steps(count):
            self.queue(step)
            yield step

    def run(self, steps: int, *, wait: bool = False) -> None:
        """Queue `steps` steps and begin the next one, which the caller may queue.

        With `wait`, the host waits for the device after each step, so that a copy ends before the next one.
        """
        self.loop = self.state.steps(100)
        for _ in range(steps):
            self.queue(next(self.loop))
            if wait:
                torch.cuda.synchronize()
        next(self.loop)

    def queue(self, step: int, *, before_write: int = 0, before_commit: int = 0) -> None:
        """Queue one step, with pauses of the given device cycles before the writes and the commit."""
        self.optimizer.zero_grad()
        batch = torch.full((8, self.width), 0.01 * (step + 1), device=GPU)
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        if before_write:
            torch.cuda._sleep(before_write)
        self.optimizer.step()
        if before_commit:
            torch.cuda._sleep(before_commit)
        self.state.commit(loss=loss, position=8 * step)

    def snapshot_s(self) -> float:
        """Return the duration of the last snapshot completed during training; 0 if there is none."""
        page = self.folder / member_directory.page_name(0)
        found = progress.read(page.read_bytes())
        return found.snapshot_cost_s if found is not None else 0.0

    def secured(self) -> SecureAnswer:
        """Request a just-in-time copy from another thread, as a launcher does, and return the answer."""
        keeping = self.state._protection
        assert keeping is not None
        found: list[SecureAnswer] = []
        listener = threading.Thread(target=lambda: found.append(keeping.snapshot_just_in_time(GENERATION)))
        listener.start()
        listener.join(120)
        return found[0]

    def held(self) -> dict[int, Bits]:
        """Return the bytes of the tensors in the arena, by step and name."""
        keeping = self.state._protection
        assert keeping is not None
        found: dict[int, Bits] = {}
        for record in keeping.snapshots.arena.records():
            layout, mapping = map_file(record.path)
            with mapping:
                at = layout.data_offset
                found[record.step] = {
                    each.name: mapping[at + each.begin : at + each.end]
                    for each in layout.entries
                    if each.dtype != "U8"
                }
        return found


def reference(steps: int, **made: Any) -> dict[int, Bits]:
    """Return the state after every step, from a training run that waits for the device after each step."""
    states: dict[int, Bits] = {}
    with folder() as memory:
        training = Training(memory, every=1, **made)
        for _ in training.steps(steps):
            torch.cuda.synchronize()
            states.update(training.held())
        states.update(training.held())
    return states


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=MEMORY) as path:
        yield Path(path)


def cycles(seconds: float) -> int:
    """Measure and return the number of device cycles that take `seconds`."""
    tried = 50_000_000
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(tried)  # raises the clock rate
    begun.record()
    torch.cuda._sleep(tried)
    ended.record()
    ended.synchronize()
    return int(seconds * tried / (begun.elapsed_time(ended) / 1e3))
