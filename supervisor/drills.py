"""Drills that were asked for, kept in the members' orders until each has been carried out or is withdrawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.messages import Drill

_MOST = 1 << 62  # of a number: microseconds of the wall clock
LIMIT_S = 4.0  # a sidecar that dies is back in one; the script that tests a run waits five for an answer


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One drill, for the ranks that `generation` has on a member."""

    member: str
    generation: int
    drill: Drill
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Drills:
    """Those that no sidecar has told of yet, oldest first. Each is carried out once at most."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._newest = 0

    def ask(self, member: str, generation: int, what: str, rank: int) -> Asked:
        """Have a drill sent with the next orders."""
        self._newest = max(time.time_ns() // 1000, self._newest + 1)
        asked = Asked(member, generation, Drill(self._newest, what, rank))
        self._asked.append(asked)
        return asked

    def heard(self, carried_out: Mapping[str, int]) -> None:
        """Take note of the newest drill that each member's sidecar, or the one before it, has carried out."""
        ours = (number for number in carried_out.values() if number <= _MOST)
        self._newest = max(self._newest, *ours, 0)  # a clock may have been set back
        for each in tuple(self._asked):
            if each.drill.number <= carried_out.get(each.member, 0):
                each.done.set()
                self._asked.remove(each)

    def due(self, member: str, generation: int) -> Drill | None:
        """Return what the order of `generation` for a member is to carry."""
        found = (each for each in self._asked if (each.member, each.generation) == (member, generation))
        return next((each.drill for each in found), None)

    async def carried_out(self, asked: Asked, limit_s: float = LIMIT_S) -> bool:
        """Wait until a drill is carried out; withdraw it and return False when that takes too long."""
        try:
            await asyncio.wait_for(asked.done.wait(), limit_s)
        except asyncio.TimeoutError:
            pass
        finally:
            if asked in self._asked:
                self._asked.remove(asked)
        return asked.done.is_set()
