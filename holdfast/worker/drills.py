"""Execute the drills that a rank carries out itself (see `holdfast.protocol.drills`)."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

from holdfast.protocol import drills


class RankDrill:
    """Executes drills on this rank, and holds back any drill that must wait for the next step."""

    def __init__(self) -> None:
        self._pending = ""  # a drill that takes effect at the next step

    def obey(self, name: str, poison: Callable[[], None] | None = None) -> None:
        """Execute the drill `name`, or keep it until the rank's next step. Does not return for "exit".

        `poison` makes the numbers of the next step NaN, and may raise anything. If it is None, there is no
        state to spoil yet, and "nan" is kept until `take_nan` is called.
        """
        if name == "exit":
            os._exit(drills.EXIT_CODE)
        if name == "nan" and poison is not None:
            poison()
        elif name in drills.DRILLS and drills.DRILLS[name].at_next_step:
            self._pending = name

    def hang(self) -> None:
        """Hang, before the rank enters a collective, if a drill requires it. Call this before each step."""
        if self._pending == "hang":
            threading.Event().wait()
        while self._pending == "spin":
            pass

    def take_nan(self) -> bool:
        """Return True if the drill "nan" has been kept, and forget it."""
        if self._pending != "nan":
            return False
        self._pending = ""
        return True


def poison_gradients(optimizer: Any) -> None:
    """Make all gradients of `optimizer` NaN."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
