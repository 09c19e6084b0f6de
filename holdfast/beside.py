"""The private state of a rank whose store lies beside ours, in the memory of the same member.

A group that is one member needs no second home for it: the stores outlive their ranks, and nothing
outlives the member. What remains of the exchange is its order: the optimizer's first write waits until the
rank before has stored its state of the step. It nearly always has, and then a look at 64 bytes is all.
"""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.errors import PeerLost
from holdfast.exchange import LIMIT_S
from holdfast.private import PrivateReader

_PAUSE_S = 50e-6


class Beside:
    """Looks into the store of rank `source`, at `path`."""

    def __init__(self, path: Path, source: int, generation: int, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.source = source
        self._store = PrivateReader(path)
        self._generation = generation
        self._step = -1

    def connect(self, _towards: str) -> None:
        """Nothing is to be connected."""

    def start(self, step: int, _blob: bytes, _late: bool) -> None:
        """Nothing is sent: what the own store holds is seen there. A `finish` is owed."""
        self._step = step

    def again(self, _step: int, _blob: bytes) -> None:
        """Nothing is sent: see `start`."""

    def take_again(self) -> None:
        """Nothing comes."""

    def finish(self) -> None:
        """Wait until `source` has stored its state of the step, or of a later one. Raises `PeerLost`."""
        deadline = 0.0
        while self._store.stored(self._generation, self._step) is None:
            deadline = deadline or time.monotonic() + self._limit_s
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {self.source}: nothing of step {self._step} stored in {self._limit_s:.0f} s"
                )
            time.sleep(_PAUSE_S)
