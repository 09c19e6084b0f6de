"""Which released process does not begin? Pure: the clock is an argument.

A rank writes its progress page itself, so one that never runs has none: it is timed here, from the launcher's
word that it was released.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.launcher_messages import LauncherState
from holdfast.messages import Stall
from holdfast.progress import Phase

LATE_S = 3.0  # a parked process begins within milliseconds: beyond this it is looked at


@dataclass(slots=True)
class Starts:
    """Since when each process of the generation has been released without a sign of it."""

    first_step_s: float
    _since_ns: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by generation, rank, pid

    def late(self, state: LauncherState, now_ns: int, lateness_s: float) -> tuple[Stall, ...]:
        """Return who should have begun. `lateness_s`: the watcher itself was held up for so long."""
        released = {
            (rank.generation, rank.rank, rank.pid)
            for rank in state.ranks
            if rank.state == "starting"
            and rank.pid
            and not rank.marks.started_ns
            and state.strategy
            != "cold"  # without a parked process it has yet to import, or is no script of ours
        }
        held_ns = int(lateness_s * 1e9)
        self._since_ns = {key: self._since_ns.get(key, now_ns - held_ns) + held_ns for key in released}
        return tuple(
            self._stall(rank, generation, (now_ns - since_ns) / 1e9)
            for (generation, rank, _), since_ns in sorted(self._since_ns.items())
            if now_ns - since_ns > LATE_S * 1e9
        )

    def _stall(self, rank: int, generation: int, waited_s: float) -> Stall:
        over = waited_s > self.first_step_s
        limit_s = self.first_step_s if over else LATE_S
        phase = Phase.JOINING
        return Stall(rank, generation, -1, int(phase), 0, "starting", round(waited_s, 3), limit_s, over)
