"""The results of one turn of the recovery bench. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Kill:
    """One kill and its outcome. Times are in seconds from the kill."""

    mode: str
    number: int
    rank: int
    pid: int
    step: int
    generation: int
    outcome: str = ""  # recovered, hung or ended
    took_s: float | None = None  # until the first new step of the last rank
    first_s: float | None = None  # until the first new step of any rank
    redone: int | None = None  # number of steps that had to be repeated
    same_pids: int = 0  # number of ranks that train again in the same process
    ready_s: float = 0.0  # how long the bench waited until the group was ready for this kill
    incident: dict[str, Any] | None = None
    detail: str = ""


@dataclass(slots=True)
class Turn:
    """One launcher from start to end, with the kills in between."""

    mode: str
    start_s: float = 0.0  # from its start to the first step of all ranks
    kills: list[Kill] = field(default_factory=list)
    status: dict[str, Any] | None = None  # the last status of a holdfast run
    stopped: bool = True  # whether the launcher ended in time after SIGTERM
    strays: list[str] = field(default_factory=list)
