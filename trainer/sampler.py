"""Choose each rank's samples in a step with a pure function, so that a resumed run uses the same samples.

All ranks follow one endless sequence of samples. In each epoch, the sequence is a permutation of the dataset
that depends only on (seed, epoch). A step takes the next `accumulate * world_size * batch` samples of the
sequence. The sampler does not use torch's global random state, which is reserved for the model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.repeatable import mix


class Sampler:
    """Selects the samples of one rank. `position` is the place in the sequence where the next step begins."""

    def __init__(
        self, size: int, batch: int, *, rank: int, world_size: int, seed: int, accumulate: int = 1
    ) -> None:
        """Select from samples 0 to `size` - 1. A step has `accumulate` batches of `batch` samples."""
        self.size, self.batch_size, self.seed = size, batch, seed
        self.step_size = accumulate * world_size * batch  # the samples of all ranks together
        passes = torch.arange(accumulate).unsqueeze(1) * (world_size * batch)
        self._mine = passes + rank * batch + torch.arange(batch)
        self.position = 0

    def first(self, step: int) -> int:
        """Return the place of the group's first sample of `step` in the sequence."""
        return step * self.step_size

    def batch(self, step: int) -> Tensor:
        """Return this rank's samples of `step`, of shape (accumulate, batch), and advance `position`."""
        places = self.first(step) + self._mine
        epochs, offsets = places // self.size, places % self.size
        samples = torch.empty_like(places)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            here = epochs == epoch
            samples[here] = _order(self.seed, epoch, self.size)[offsets[here]]
        self.position = self.first(step + 1)
        return samples

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the position from `state`. Raises `ValueError` if `state` has a different seed."""
        if state["seed"] != self.seed:
            raise ValueError(
                f"the saved data order has seed {state['seed']}, but this run has --seed {self.seed}"
            )
        self.position = state["position"]


@functools.lru_cache(maxsize=2)  # a step can straddle two epochs
def _order(seed: int, epoch: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(size, generator=generator)
