"""How long a rank works in a step before it waits for the others: its own time. Pure.

All ranks of a group have the same step time, for in the backward pass the fast ones wait for the slow one.
What tells them apart comes before: the time until the forward pass, and the forward pass itself.

The page has the sums of both over the generation. They are looked at every few steps, and what has passed
between two looks is a block. The last blocks are the window: of a rank whose steps are uneven some block is
always short, and a single long step lengthens one block only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.protocol.progress import Progress

BLOCKS = 10  # in a window: at least 50 steps, and at least 5 s
BLOCK_STEPS = 5
BLOCK_S = 0.5  # what holds a core for a moment is a whole window of steps of a millisecond


@dataclass(frozen=True, slots=True)
class StepBlock:
    """What a rank did in some steps in a row."""

    steps: int
    data_s: float  # of all of them, until each forward pass
    own_s: float  # that, and the forward passes


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """The last blocks of one rank in one generation. The first step, which is no usual one, is in none."""

    generation: int = 0
    steps: int = 0  # done when the present block began
    began_ns: int = 0
    data_ns: int = 0
    own_ns: int = 0
    blocks: tuple[StepBlock, ...] = ()

    def later(self, found: Progress, now_ns: int) -> ComputeTime:
        """Return what is known after a look at the page."""
        data_ns, own_ns = found.data_ns, found.data_ns + found.forward_ns
        begun = ComputeTime(found.generation, found.steps_done, now_ns, data_ns, own_ns)
        if found.generation != self.generation or not 0 < self.steps <= found.steps_done:
            return begun
        steps = found.steps_done - self.steps
        if steps < BLOCK_STEPS or now_ns - self.began_ns < BLOCK_S * 1e9:
            return self
        block = StepBlock(steps, (data_ns - self.data_ns) / 1e9, (own_ns - self.own_ns) / 1e9)
        return replace(begun, blocks=(*self.blocks, block)[-BLOCKS:])

    @property
    def window(self) -> int:
        """The steps of a whole window; 0 while it is not whole, or where no forward pass is seen."""
        if len(self.blocks) < BLOCKS or not all(each.own_s > 0 for each in self.blocks):
            return 0
        return sum(each.steps for each in self.blocks)

    @property
    def mean_s(self) -> float:
        """The own time of a step in the window."""
        return sum(each.own_s for each in self.blocks) / self.window if self.window else 0.0

    @property
    def data_s(self) -> float:
        """The part of `mean_s` that comes before the forward pass."""
        return sum(each.data_s for each in self.blocks) / self.window if self.window else 0.0

    @property
    def least_s(self) -> float:
        """The own time of a step in the shortest block: in the whole window it was never less."""
        return min(each.own_s / each.steps for each in self.blocks) if self.window else 0.0
