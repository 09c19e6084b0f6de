"""Measure a rank's own time: how long it works in each step before it waits for other ranks. Pure.

All ranks of a group have the same step time, because fast ranks wait for the slowest in the backward pass.
They differ only before that: in the time until the forward pass, and in the forward pass itself.

The progress page contains the sums of these two times over the generation. The sidecar reads the sums every
few steps. The steps between two readings form a block, and the last `BLOCKS` blocks form the window. Even if
a rank's steps are uneven, some block in the window is short, and a single long step lengthens only one block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.protocol.progress import Progress

BLOCKS = 10  # the number in a window, which therefore covers at least 50 steps and at least 5 s
BLOCK_STEPS = 5  # the fewest steps in a block
# The shortest duration of a block. If steps take 1 ms, a brief load on a core must not slow down a whole
# window.
BLOCK_S = 0.5


@dataclass(frozen=True, slots=True)
class StepBlock:
    """A rank's own time in consecutive steps."""

    steps: int
    data_s: float  # total time before the forward passes
    own_s: float  # `data_s` plus the total time of the forward passes


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """The last blocks of one rank in one generation. They exclude the first step, which is not typical."""

    generation: int = 0
    steps: int = 0  # how many were complete when the current block began
    began_ns: int = 0
    data_ns: int = 0
    own_ns: int = 0
    blocks: tuple[StepBlock, ...] = ()

    def later(self, found: Progress, now_ns: int) -> ComputeTime:
        """Return the blocks after the page was read as `found` at `now_ns`."""
        data_ns, own_ns = found.data_ns, found.data_ns + found.forward_ns
        restarted = ComputeTime(found.generation, found.steps_done, now_ns, data_ns, own_ns)
        if found.generation != self.generation or not 0 < self.steps <= found.steps_done:
            return restarted
        steps = found.steps_done - self.steps
        if steps < BLOCK_STEPS or now_ns - self.began_ns < BLOCK_S * 1e9:
            return self
        block = StepBlock(steps, (data_ns - self.data_ns) / 1e9, (own_ns - self.own_ns) / 1e9)
        return replace(restarted, blocks=(*self.blocks, block)[-BLOCKS:])

    @property
    def window(self) -> int:
        """The number of steps in a full window; 0 until it is full, or if no forward pass was recorded."""
        if len(self.blocks) < BLOCKS or not all(each.own_s > 0 for each in self.blocks):
            return 0
        return sum(each.steps for each in self.blocks)

    @property
    def mean_s(self) -> float:
        """The mean own time of a step in the window; 0 without a full window."""
        return sum(each.own_s for each in self.blocks) / self.window if self.window else 0.0

    @property
    def data_s(self) -> float:
        """The part of `mean_s` before the forward pass."""
        return sum(each.data_s for each in self.blocks) / self.window if self.window else 0.0

    @property
    def least_s(self) -> float:
        """The mean own time of a step in the fastest block of the window."""
        return min(each.own_s / each.steps for each in self.blocks) if self.window else 0.0
