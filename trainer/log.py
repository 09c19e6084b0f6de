"""Print the trainer's progress on rank 0, one unbuffered line at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor


class Log:
    """Prints a line every `every` steps and after the last step, or no lines if `every` is 0.

    Each line includes the rate, in `unit` per second.
    """

    def __init__(self, *, rank: int, every: int, steps: int, unit: str) -> None:
        self._speaks, self._every, self._steps, self._unit = rank == 0, every, steps, unit
        self._since_s, self._done = time.perf_counter(), 0

    def say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)  # noqa: T201 - a trainer reports on stdout

    def step(self, step: int, *, loss: Tensor, norm: Tensor, lr: float, done: int) -> None:
        """Report `step`, with rank 0's loss and norm. All ranks together processed `done` units in it."""
        self._done += done
        if self._every == 0 or (step % self._every and step != self._steps - 1):
            return
        rate = self._done / (time.perf_counter() - self._since_s)
        self.say(
            f"step {step:5d}  loss {loss.item():.4f}  grad norm {norm.item():.3f}  lr {lr:.2e}"
            f"  {rate:.0f} {self._unit}/s"
        )
        self._since_s, self._done = time.perf_counter(), 0

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time spent in this context from the rate."""
        before_s = time.perf_counter()
        yield
        self._since_s += time.perf_counter() - before_s
