"""Track requested drills. A member's orders contain its drill until it is carried out or withdrawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.protocol.drills import DRILLS
from holdfast.protocol.member_messages import DrillOrder
from supervisor.view import reports
from supervisor.view.model import SECOND_NS, View
from supervisor.wording import seconds

_MAX_NUMBER = 1 << 62  # a drill's number is the wall-clock time in microseconds; higher numbers are invalid
STILL_S = 2.0  # shorter times without a step are usual
_AT_NEXT_STEP = ("hang", "spin", "nan")
LIMIT_S = 10.0  # a dead sidecar is replaced within one second; a stalled disk can add a few seconds


@dataclass(slots=True, eq=False)
class PendingDrill:
    """A drill for the ranks of `generation` on one member.

    `over` is set when the drill is carried out or withdrawn. `refused` says why it was withdrawn.
    """

    member: str
    generation: int
    drill: DrillOrder
    over: asyncio.Event = field(default_factory=asyncio.Event)
    refused: str = ""


def obstacle(view: View, status: Mapping[str, Any], what: str, rank: int) -> str:
    """Return why the drill `what` does not take effect now on `rank`, as a clause; "" if it does.

    Args:
        status: The last status, which says for how long no step was completed.
    """
    executor = DRILLS[what].executor
    if executor not in ("rank", "launcher") or what == "kill":
        return ""
    if any(each.stopped for each in reports.ranks(view) if each.rank == rank):
        if what == "stop":
            return f"rank {rank} was already stopped"
        return f"rank {rank} is stopped, and carries out no drill unless it is continued"
    still_s = max(float(status.get("no_step_s") or 0.0), _without_first_step_s(view, rank))
    if what not in _AT_NEXT_STEP or still_s < STILL_S:
        return ""
    return (
        f"rank {rank} has completed no step for {seconds(still_s)}: the drill takes effect only if it"
        " completes this step, and not at all if the group is restarted first"
    )


def _without_first_step_s(view: View, rank: int) -> float:
    """Return how long the generation has run if `rank` has not completed its first step; 0 if it has.

    A rank becomes late in its first step only after a while, so the status may not show this time.
    """
    memory = view.memory
    if memory.phase != "running" or memory.settled:
        return 0.0
    if any(each.rank == rank and each.marks.first_step_ns for each in reports.ranks(view)):
        return 0.0
    return (view.now_ns - max(memory.started_ns, memory.since_ns)) / SECOND_NS


class Drills:
    """The drills that no sidecar has reported as carried out. Each is carried out at most once."""

    def __init__(self) -> None:
        self._pending: list[PendingDrill] = []  # oldest first
        self._newest = 0

    def ask(self, member: str, generation: int, what: str, rank: int) -> PendingDrill:
        """Request `what`, a drill of `DRILLS`. The member's next order contains it."""
        self._newest = max(time.time_ns() // 1000, self._newest + 1)
        pending = PendingDrill(member, generation, DrillOrder(self._newest, DRILLS[what].name, rank))
        self._pending.append(pending)
        return pending

    def update(self, carried_out: Mapping[str, int], generation: int) -> None:
        """Drop the drills that were carried out, and withdraw those for ranks of earlier generations.

        `carried_out` maps each member to the number of the newest drill that its current
        sidecar or an earlier one has carried out.
        """
        numbers = (number for number in carried_out.values() if number <= _MAX_NUMBER)
        self._newest = max(self._newest, *numbers, 0)  # the wall clock may have been set back
        for each in tuple(self._pending):
            if each.drill.number <= carried_out.get(each.member, 0):
                self._end(each)
            elif each.generation < generation:
                self._end(each, f"a fault occurred first, and the group is now generation {generation}")

    def due(self, member: str, generation: int) -> DrillOrder | None:
        """Return the oldest drill for the ranks of `generation` on a member; None if there is none."""
        found = (each for each in self._pending if (each.member, each.generation) == (member, generation))
        return next((each.drill for each in found), None)

    async def refusal(self, pending: PendingDrill, limit_s: float = LIMIT_S) -> str:
        """Wait until a drill is over. Return "" if it was carried out, or the reason why it was withdrawn.

        The drill is withdrawn after `limit_s`, or when the caller is cancelled.
        """
        try:
            await asyncio.wait_for(pending.over.wait(), limit_s)
        except asyncio.TimeoutError:
            pass
        finally:
            if pending in self._pending:
                late = f"the sidecar of member {pending.member} has not carried it out within {limit_s:g} s"
                self._end(pending, late)
        return pending.refused

    def _end(self, pending: PendingDrill, refused: str = "") -> None:
        pending.refused = refused
        pending.over.set()
        self._pending.remove(pending)
