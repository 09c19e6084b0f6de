"""Watch one member for its sidecar: whether the launcher responds, and which ranks are late or busy.

`MemberWatch` reads the launcher's last state and the ranks' progress pages. It sends nothing and carries out
no orders. After each change that the sidecar must report, it calls `changed`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.inspection import liveness
from holdfast.inspection.liveness import HeartbeatSilence
from holdfast.process import linux
from holdfast.protocol.launcher_messages import LauncherState
from holdfast.protocol.member_messages import MemberOrder, RankProgress, RankStall
from holdfast.protocol.progress import tail_began_ns
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.clients import LauncherClient
from sidecar.config import Config
from sidecar.watch.late_ranks import HangPolicy
from sidecar.watch.progress_monitor import ProgressMonitor
from sidecar.watch.start_monitor import StartMonitor

log = logging.getLogger(__name__)


class MemberWatch:
    """How one member's launcher and ranks were doing at the last poll.

    `stalls` contains the late ranks. `silent` says why the launcher is considered unresponsive; it is ""
    while the launcher responds. `unreachable` says why there has been no connection to the launcher for
    `liveness.LIMIT_S`; otherwise "".
    """

    def __init__(self, config: Config, launcher: LauncherClient, changed: Callable[[], None]) -> None:
        policy = HangPolicy(
            factor=config.hang_factor,
            floor_s=config.hang_floor_s,
            first_step_s=config.first_step_s,
            pause_s=config.pause_s,
        )
        self.pages = ProgressMonitor(config.directory, config.nproc, policy, sees_processes=not config.is_pod)
        self._sees_processes = not config.is_pod
        self.stalls: tuple[RankStall, ...] = ()
        self.silent = self.unreachable = ""
        self._unreached_since_s: float | None = None
        self._launcher, self._changed = launcher, changed
        self._stalled_ns = 0  # when `stalls` was set
        # The steps whose state a rank of this member changed after the commit.
        self._changed_steps: frozenset[int] = frozenset()
        self._stopped: set[tuple[int, int]] = set()  # (rank, pid) of ranks that a signal has stopped
        self._starts = StartMonitor(config.first_step_s)
        self._silence = HeartbeatSilence()

    # -- polls

    def poll_launcher(self, now_s: float, lateness_s: float) -> None:
        """Determine whether the launcher has been silent for too long."""
        self._silence = self._silence.later(self._launcher.heard_s, now_s, lateness_s)
        silent_s, why = self._silence.length_s(now_s), ""
        if silent_s > liveness.LIMIT_S:
            pid = self._launcher.state.pid if self._launcher.state else 0
            state = linux.state_of(pid)[0] if self._sees_processes else liveness.UNKNOWN
            why = liveness.verdict(silent_s, state)
        if bool(why) != bool(self.silent):
            log.warning("launcher silent" if why else "launcher responds again", extra={"why": why})
            self.silent = why
            self._changed()

    def poll_connection(self, now_s: float) -> None:
        """Determine whether the launcher has been unreachable for longer than its start or its end takes."""
        why = self._launcher.unreachable
        since_s = self._unreached_since_s = (self._unreached_since_s or now_s) if why else None
        if since_s is not None and now_s - since_s < liveness.LIMIT_S:
            why = ""
        if why != self.unreachable:
            log.warning("launcher unreachable" if why else "launcher reachable again", extra={"why": why})
            self.unreachable = why
            self._changed()

    def poll_ranks(self, order: MemberOrder, lateness_s: float) -> None:
        """Determine which ranks are late. Do nothing unless the order is to run."""
        state = self._launcher.state
        if state is None or order.do != "run":
            self.pages.left_s = math.inf
            return
        now_ns = time.monotonic_ns()
        alive = {r.rank for r in state.ranks if r.state in ("starting", "running")}
        if self.pages.policy.joins != state.joins:
            self.pages.policy = replace(self.pages.policy, joins=state.joins)
        found = self.pages.poll(state.generation, now_ns, lateness_s)
        late = (*found, *self._starts.poll(state, now_ns, lateness_s))
        stalls = tuple(stall for stall in late if stall.rank in alive)
        if {_identity(each) for each in stalls} != {_identity(each) for each in self.stalls}:
            self.stalls, self._stalled_ns = stalls, now_ns
            self._changed()

    def poll_void_steps(self, order: MemberOrder) -> frozenset[int]:
        """Return the steps of the order's generation whose snapshots are void.

        A snapshot is void if a rank of this member changed the state after the commit. It is also void if a
        rank of another member changed the state, unless a rank here has amended its own. Unless the order is
        to run, no step is void.
        """
        if order.do != "run":
            return frozenset()
        ranks = self.pages.raw(order.generation)
        changed_steps = frozenset(step for each in ranks for step in each.late)
        if changed_steps != self._changed_steps:
            self._changed_steps = changed_steps
            self._changed()
        return changed_steps | (set(order.void) - {step for each in ranks for step in each.amended})

    def forget_stalls(self) -> None:
        """Forget the stalls, because another generation begins."""
        self.stalls = ()

    # -- results of the last poll, and what the pages contain now

    def stalls_now(self) -> tuple[RankStall, ...]:
        """Return the stalls, with their durations up to now."""
        more_s = (time.monotonic_ns() - self._stalled_ns) / 1e9
        return tuple(replace(each, stalled_s=round(each.stalled_s + more_s, 3)) for each in self.stalls)

    def needs_inspection(self, order: MemberOrder) -> bool:
        """Return True while a rank of this member is late, or `order` says that a rank elsewhere is."""
        return bool(self.stalls) or (order.do == "run" and order.look > 0)

    def progress(self, state: LauncherState, now_ns: int) -> tuple[RankProgress, ...]:
        """Return the progress of each rank of the launcher's generation."""
        self._note_stopped(state)
        endings = {
            rank.rank: rank.ending.at_ns
            for rank in state.ranks
            if rank.ending is not None and (rank.state == "exited" or not rank.ending.unwinding)
        }
        return self.pages.progress(state.generation, now_ns, endings)

    def _note_stopped(self, state: LauncherState) -> None:
        """Record which ranks, according to the launcher, are stopped or were stopped when they ended."""
        for rank in state.ranks:
            if rank.stopped:
                self._stopped.add((rank.rank, rank.pid))
            elif rank.state != "exited":
                self._stopped.discard((rank.rank, rank.pid))
        present = {(rank.rank, rank.pid) for rank in state.ranks}
        self._stopped &= present
        self.pages.note_stopped(frozenset(number for number, _ in self._stopped))

    def ranks_in_tail(self, generation: int) -> frozenset[int]:
        """Return the running ranks that are in a tail, or between the optimizer's writes and the commit."""
        state = self._launcher.state
        if state is None:
            return frozenset()
        alive = frozenset(rank.rank for rank in state.ranks if rank.state == "running")
        found = self.pages.raw(generation)
        tails = {each.rank for each in found if tail_began_ns(each)}
        return alive & (tails | self.pages.uncommitted(generation, time.monotonic_ns()))

    def is_final(self, record: CommitRecord) -> bool:
        """Return False during the tail of the snapshot's step, because a rank can still change the state."""
        found = self.pages.raw(record.generation)
        return not any(each.step == record.step and tail_began_ns(each) for each in found)


def _identity(stall: RankStall) -> tuple[int, int, bool, str, bool]:
    return stall.rank, stall.step, stall.limited, stall.phase_name, stall.early_s > 0
