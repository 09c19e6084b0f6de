"""Looks at the clock: its jumps, and whether it is disciplined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nodeagent.host import clock_step, clock_sync
from nodeagent.observation import NODE
from nodeagent.reading import LeftOut, Reading


class Clocks:
    """Sees the clock of the kernel that it runs on; a container has no other."""

    checks = frozenset({"clock_step", "clock_unsynchronised"})

    def __init__(self) -> None:
        self._offset: float | None = None
        self._refused = ""

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found: list[Reading] = []
        if "clock_step" in due:
            found += self._step()
        if "clock_unsynchronised" in due:
            found += self._sync()
        return found

    def left_out(self) -> tuple[LeftOut, ...]:
        return (LeftOut("clock_unsynchronised", self._refused),) if self._refused else ()

    def _step(self) -> Iterator[Reading]:
        offset = clock_step.offset(clock_step.take())
        if offset is not None:
            step = clock_step.step(self._offset, offset)
            ahead = self._offset is not None and offset > self._offset
            self._offset = offset
            way = f"{step:.3f} s {'ahead' if ahead else 'back'}" if step >= 0.001 else ""
            yield Reading("clock_step", NODE, round(step, 6), way)

    def _sync(self) -> Iterator[Reading]:
        try:
            bits = clock_sync.status()
        except OSError as error:
            self._refused = f"adjtimex: {error.strerror}"
            return
        self._refused = ""
        yield Reading("clock_unsynchronised", NODE, clock_sync.state(bits), clock_sync.words(bits))
