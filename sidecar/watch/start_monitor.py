"""Find processes that were released to become ranks but never start. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.launcher_messages import LauncherState
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import NOT_BEGUN, Phase

LATE_S = 3.0  # after this time, a process is inspected; a warm process starts within milliseconds


@dataclass(slots=True)
class StartMonitor:
    """Finds released processes that do not start.

    A rank writes its own progress page, so a process that never runs has none. This class therefore uses the
    time since the launcher reported the process as released.
    """

    first_step_s: float
    _since_ns: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by generation, rank, pid

    def poll(self, state: LauncherState, now_ns: int, lateness_s: float) -> tuple[RankStall, ...]:
        """Record which processes have not started yet, and return those that should have.

        `lateness_s` is the lateness of the sidecar itself.
        """
        released = {
            (rank.generation, rank.rank, rank.pid)
            for rank in state.ranks
            if rank.state == "starting"
            and rank.pid
            and not rank.marks.started_ns
            # A cold process still has to import its modules, or does not run a Python script.
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
