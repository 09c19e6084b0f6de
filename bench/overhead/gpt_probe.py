"""Run the unmodified bundled GPT trainer, and record its steps and the time it spends in holdfast's calls.

`python -m bench.overhead.gpt_probe ARGS` takes the arguments of `python -m trainer.gpt`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer

from bench.harness.ticks import Ticker
from bench.overhead.blocks import Blocks
from bench.overhead.stopwatch import INSIDE, OUTPUT, SKIP, WHOLE, Stopwatch
from holdfast.worker import launcher_channel
from trainer.gpt.__main__ import main


def timed_calls() -> tuple[tuple[Any, str, str], ...]:
    """Return each of holdfast's calls in a training step: its owner, its attribute and its report name."""
    from holdfast.protocol.progress_writer import Page
    from holdfast.snapshot.private_store import PrivateStore
    from holdfast.state.private_state import PrivateState
    from holdfast.training.protection.private_backup import SendTiming
    from holdfast.training.protection.private_exchange import LocalPrivateState, PrivateStateRing
    from holdfast.training.protection.snapshot_writer import SnapshotWriter
    from holdfast.training.state import State
    from holdfast.training.training_step import TrainingStep

    return (
        (TrainingStep, "before_write", "before the optimizer's writes"),
        (State, "commit", "commit"),
        (TrainingStep, "forward", "forward hook"),
        (TrainingStep, "backward", "backward hook"),
        (SendTiming, "begin", "step begin"),
        (PrivateState, "core", "collect private state"),
        (PrivateState, "random", "random states"),
        (PrivateStore, "put", "store private state"),
        (PrivateStateRing, "send", "exchange with a peer, send"),
        (PrivateStateRing, "receive", "exchange with a peer, receive (including the wait)"),
        (LocalPrivateState, "receive", "read a peer's state from shared memory"),
        (SnapshotWriter, "write", "snapshot"),
        (Page, "commit", "progress write"),
        (Page, "phase", "phase write"),
    )


def watch() -> Stopwatch:
    """Wrap all of holdfast's calls in a training step, and return the stopwatch that times them."""
    watch = Stopwatch()
    for owner, attribute, name in timed_calls():
        watch.wrap(owner, attribute, name)
    return watch


class StepCounterProbe:
    """Counts the group's steps with a torch hook, the same way under every launcher."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.steps = 0
        self._stopwatch = stopwatch
        self._skip = int(os.environ.get(SKIP, "0"))
        self._ticker: Ticker | None = None

    def after_step(self, *_: Any) -> None:
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return  # this is a rehearsal, which has only one rank
        if self._ticker is None:
            self._ticker = Ticker()
        self._ticker.tick(self.steps)
        self.steps += 1
        if self.steps == self._skip:
            self._stopwatch.reset()
        if self.steps >= self._skip:
            # Choose by the parity of the number of 1 bits: steps with a snapshot are multiples of a power of
            # two, and each kind gets half of them.
            self._stopwatch.turn(INSIDE if bin(self.steps).count("1") % 2 else WHOLE)


def take_turns() -> None:
    """Make the training wait for its turn before each block of steps, if it shares the cores."""
    from holdfast.training.state import State

    steps = State.steps

    def in_blocks(self: State, count: int) -> Iterator[int]:
        blocks = Blocks.given(self._rank.number)
        for step in steps(self, count):
            if blocks is not None and blocks.begins(step):
                with self.pause("another's turn"):
                    blocks.wait(step)
            yield step
        if blocks is not None:
            blocks.end(count)

    State.steps = in_blocks  # type: ignore[method-assign]


def take_out() -> None:
    """Replace the functions of holdfast that the script calls with empty ones, which leaves plain DDP."""
    from holdfast.state import torch_hooks
    from holdfast.training.misuse import unprotected
    from holdfast.training.state import State

    def count(self: State, loss: object = None, *_: object, **__: object) -> None:
        self.step += 1

    torch_hooks.attach_hooks = lambda *_: None
    unprotected.UnprotectedTraining = lambda *_: None  # type: ignore[misc,assignment]
    State.commit = count  # type: ignore[method-assign]


def run() -> None:
    if os.environ.get("TORCHELASTIC_RUN_ID") and launcher_channel.current_channel is None:
        take_out()
    take_turns()
    stopwatch = watch()
    probe = StepCounterProbe(stopwatch)
    torch_optimizer.register_optimizer_step_post_hook(probe.after_step)
    main()
    folder = os.environ.get(OUTPUT)
    if folder:
        rank = os.environ.get("RANK", "0")
        stopwatch.write(Path(folder) / f"spent-{rank}.json")


if __name__ == "__main__":
    run()
