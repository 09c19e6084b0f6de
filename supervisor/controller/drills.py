"""Drills that were asked for, kept in the members' orders until each has been carried out or is withdrawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.protocol.member_messages import DrillOrder

_MOST = 1 << 62  # of a number: microseconds of the wall clock
LIMIT_S = 10.0  # a sidecar that dies is back in one; a machine whose disk stalls takes a few more


@dataclass(slots=True, eq=False)
class Asked:
    """One drill, for the ranks that `generation` has on a member. `refused` says why it will not be done."""

    member: str
    generation: int
    drill: DrillOrder
    over: asyncio.Event = field(default_factory=asyncio.Event)
    refused: str = ""


class Drills:
    """Those that no sidecar has told of yet, oldest first. Each is carried out once at most."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._newest = 0

    def ask(self, member: str, generation: int, what: str, rank: int) -> Asked:
        """Have a drill sent with the next orders."""
        self._newest = max(time.time_ns() // 1000, self._newest + 1)
        asked = Asked(member, generation, DrillOrder(self._newest, what, rank))
        self._asked.append(asked)
        return asked

    def heard(self, carried_out: Mapping[str, int], generation: int) -> None:
        """Take note of the newest drill that each member's sidecar, or the one before it, has carried out.

        Those for ranks from before `generation` are withdrawn: the ranks that they were for are gone.
        """
        ours = (number for number in carried_out.values() if number <= _MOST)
        self._newest = max(self._newest, *ours, 0)  # a clock may have been set back
        for each in tuple(self._asked):
            if each.drill.number <= carried_out.get(each.member, 0):
                self._end(each)
            elif each.generation < generation:
                self._end(each, f"a fault came first, and the group is generation {generation} now")

    def due(self, member: str, generation: int) -> DrillOrder | None:
        """Return what the order of `generation` for a member is to carry."""
        found = (each for each in self._asked if (each.member, each.generation) == (member, generation))
        return next((each.drill for each in found), None)

    async def refusal(self, asked: Asked, limit_s: float = LIMIT_S) -> str:
        """Wait until a drill is carried out, and return ""; else why it was withdrawn."""
        try:
            await asyncio.wait_for(asked.over.wait(), limit_s)
        except asyncio.TimeoutError:
            pass
        finally:
            if asked in self._asked:
                late = f"the sidecar of member {asked.member} has not carried it out within {limit_s:g} s"
                self._end(asked, late)
        return asked.refused

    def _end(self, asked: Asked, refused: str = "") -> None:
        asked.refused = refused
        asked.over.set()
        self._asked.remove(asked)
