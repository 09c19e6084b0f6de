"""A clock that advances only when a test moves it."""

from __future__ import annotations

from nodeagent.sensing.clock import Anchor, Clock


class Ticking(Clock):
    def __init__(self, now_s: float = 1000.0, boot: str = "boot") -> None:
        super().__init__(Anchor(boot, 0.0))
        self.at_s = now_s

    def now_s(self) -> float:
        return self.at_s
