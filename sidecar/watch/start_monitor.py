"""Finds processes that were released to become ranks and do not begin. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.launcher_messages import LauncherState
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import NOT_BEGUN, Phase

LATE_S = 3.0  # a parked process begins within milliseconds: after this time it is inspected


@dataclass(slots=True)
class StartMonitor:
    """Finds released processes that do not begin.

    A rank writes its progress page itself, so a process that never runs has none: it is timed here, from the
    launcher's report that it was released.
    """

    first_step_s: float
    _since_ns: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by generation, rank, pid

    def late(self, state: LauncherState, now_ns: int, lateness_s: float) -> tuple[RankStall, ...]:
        """Return the processes that should have begun. `lateness_s`: how late the watcher itself is."""
        released = {
            (rank.generation, rank.rank, rank.pid)
            for rank in state.ranks
            if rank.state == "starting"
            and rank.pid
            and not rank.marks.started_ns
            # A process that was not parked has yet to import, or is not a script that Holdfast runs.
            and state.strategy != "cold"
        }
        held_ns = int(lateness_s * 1e9)
        self._since_ns = {key: self._since_ns.get(key, now_ns - held_ns) + held_ns for key in released}
        return tuple(
            self._stall(rank, generation, (now_ns - since_ns) / 1e9)
            for (generation, rank, _), since_ns in sorted(self._since_ns.items())
            if now_ns - since_ns > LATE_S * 1e9
        )

    def _stall(self, rank: int, generation: int, waited_s: float) -> RankStall:
        over = waited_s > self.first_step_s
        limit_s = self.first_step_s if over else LATE_S
        phase = int(Phase.JOINING)
        return RankStall(rank, generation, -1, phase, 0, NOT_BEGUN, round(waited_s, 3), limit_s, over)
