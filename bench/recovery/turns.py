"""What a turn of the recovery bench has found. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Kill:
    """One kill and what became of it. Times in seconds from the kill."""

    mode: str
    number: int
    rank: int
    pid: int
    step: int
    generation: int
    outcome: str = ""  # recovered, hung, ended
    took_s: float | None = None  # to the first new step of the last rank
    first_s: float | None = None  # to the first new step of any rank
    redone: int | None = None  # steps that were done and had to be done again
    same_pids: int = 0  # ranks that went on in the process they had
    ready_s: float = 0.0  # how long we waited before this kill until all was ready
    incident: dict[str, Any] | None = None
    detail: str = ""


@dataclass(slots=True)
class Turn:
    """One launcher's life: some kills in it."""

    mode: str
    start_s: float = 0.0  # from its start to the first step of all ranks
    kills: list[Kill] = field(default_factory=list)
    status: dict[str, Any] | None = None  # of a holdfast run, at its end
    stopped: bool = True  # it ended in time when told to
    strays: list[str] = field(default_factory=list)
