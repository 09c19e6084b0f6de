"""One rank of a generation, as its launcher knows it: who sits there, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.launcher.warm_pool import Process
from holdfast.protocol.launcher_messages import Ending, Flag, Marks, RankStart


@dataclass(slots=True, eq=False)
class Seat:
    """`process` is None until a warm one is there."""

    rank: int
    local_rank: int
    order: RankStart
    process: Process | None = None
    ending: Ending | None = None
    flag: Flag | None = None
    marks: Marks = field(default_factory=Marks)
    exited: bool = False
    note: str = ""
    where: str = ""
    stopped: bool = False
    left: str = ""

    @property
    def state(self) -> str:
        if self.exited:
            return "exited"
        if self.ending is not None:
            return "failing"
        return "running" if self.marks.started_ns else "starting"


def survivors(seats: tuple[Seat, ...]) -> list[tuple[Seat, Process]]:
    """Return who has a process that has not ended, and that process."""
    return [(s, s.process) for s in seats if s.process is not None and s.process.pid and not s.exited]
