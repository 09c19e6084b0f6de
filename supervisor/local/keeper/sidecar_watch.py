"""Replace sidecars that are alive but stopped or stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.inspection import process_stats
from holdfast.inspection.liveness import Stops
from supervisor.local.keeper.members import LocalMember

IDLE_S = 0.5  # a working sidecar polls its ranks twice in this time, which uses CPU time
NEW_S = 2.0  # the time for a sidecar to import its modules and connect


@dataclass(slots=True)
class SidecarWatch:
    """Kills stuck sidecars; `say` is called with a line for the user. The ranks keep training."""

    say: Callable[[str], None]
    _stops: Stops = field(default_factory=Stops)  # which sidecars are stopped
    # the CPU time of each silent sidecar, and when it was read; the key is the PID
    _silent: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note_silence(self, member: LocalMember, now_s: float) -> None:
        """Record that a sidecar is silent, with its CPU time, which `replace_stuck` compares later."""
        if member.sidecar is None or now_s - member.sidecar.born_s < NEW_S:
            return
        pid = member.sidecar.process.pid
        self._silent[pid] = (process_stats.sample(pid).cpu_s, now_s)

    def replace_stuck(self, members: Iterable[LocalMember], now_s: float) -> None:
        """Replace sidecars that are stopped, or that neither report nor use CPU time.

        Their ranks keep training. A sidecar that waits for a core or a disk is left alone. A sidecar is also
        left alone if its launcher is stopped too, because the whole member or machine was stopped in that
        case.
        """
        pids = {m.sidecar.process.pid: m for m in members if m.sidecar is not None and not m.gone}
        stopped = [pid for pid, m in pids.items() if process_stats.is_stopped(pid) and not _is_frozen(m)]
        for pid in self._stops.later(stopped, now_s):
            self._replace(pids[pid], "it is stopped")
        for pid, (cpu_s, at_s) in list(self._silent.items()):
            if now_s - at_s < IDLE_S:
                continue
            del self._silent[pid]
            found = process_stats.sample(pid)
            if pid not in pids or _is_frozen(pids[pid]):
                continue
            if found.state == "S" and not found.traced and found.cpu_s == cpu_s:
                self._replace(pids[pid], "it sends no reports and uses no CPU time")

    def _replace(self, member: LocalMember, why: str) -> None:
        """Kill a sidecar. The next one starts only after it has ended, so a member never has two."""
        assert member.sidecar is not None
        self.say(f"replacing {member.sidecar.name}: {why}. The ranks keep training")
        member.sidecar.process.kill()


def _is_frozen(member: LocalMember) -> bool:
    """True if the member's launcher is stopped (state T)."""
    return member.launcher is not None and process_stats.is_stopped(member.launcher.process.pid)
