"""Collect the member's complete state in a report to the supervisor."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace

from holdfast.process import clock, event_loop
from holdfast.protocol import foreign_text
from holdfast.protocol.launcher_messages import LauncherState
from holdfast.protocol.member_messages import PROTOCOL, MemberOrder, MemberReport
from sidecar.clients import LauncherClient
from sidecar.config import Config
from sidecar.fencing import CompletedDrills, OrderFence
from sidecar.rank_preparation import RankPreparation
from sidecar.securing import StateSecurer
from sidecar.state.checkpointing import CheckpointSaver, CheckpointSchedule
from sidecar.state.holdings import Holdings
from sidecar.state.memory_limits import MemoryGauge
from sidecar.state.restore import Restorer
from sidecar.state.sealing import SnapshotSealer
from sidecar.state.storage_listing import StorageLister
from sidecar.watch.member_watch import MemberWatch
from sidecar.watch.neighbour_probe import NeighbourProbe


@dataclass(slots=True, kw_only=True)
class MemberReporter:
    """The parts of a sidecar that its reports describe. `lag` is None if it is not measured."""

    config: Config
    lag: event_loop.Lag | None
    launcher: LauncherClient
    observed: MemberWatch
    holdings: Holdings
    memory: MemoryGauge
    sealer: SnapshotSealer
    securer: StateSecurer
    restorer: Restorer
    preparation: RankPreparation
    checkpoint_saver: CheckpointSaver
    checkpoint_schedule: CheckpointSchedule
    storage_lister: StorageLister | None
    fence: OrderFence
    drilled: CompletedDrills
    neighbours: NeighbourProbe
    _clock: str = field(default_factory=clock.identity, init=False)
    _sequence: int = field(default=0, init=False)

    def next_report(
        self, order: MemberOrder, peer_url: str, refused: str, *, names_neighbours: bool
    ) -> MemberReport:
        """Number and return the next report.

        `order` is the current order, and `refused` says why an order was last refused. `names_neighbours` is
        True if the supervisor that receives the report has named neighbours; an older version does not, and
        does not know the fields about them.
        """
        self._sequence += 1
        state = self.launcher.state
        slots = self.holdings.slots()
        now_ns = time.monotonic_ns()
        progress = self.observed.progress(state, now_ns) if state else ()
        sizes = (*(each.state_bytes for each in progress), *(each.total_bytes for each in slots))
        lag_s, lag_p99_s = self.lag.over_last_minute() if self.lag is not None else (0.0, 0.0)
        seen = state if state is not None and self.observed.needs_inspection(order) else None
        failure = self.preparation.failure
        report = MemberReport(
            protocol=PROTOCOL,
            member=self.config.member,
            node=self.config.node,
            sidecar_pid=os.getpid(),
            sequence=self._sequence,
            now_ns=now_ns,
            nproc=self.config.nproc,
            launcher=replace(state, looks=()) if state is not None and state.looks else state,
            launcher_silent=self.observed.silent,
            peer_url=peer_url,
            progress=progress,
            stalls=self.observed.stalls_now(),
            looks=seen.looks if seen else (),
            looked_for=seen.generation if seen else 0,
            look=seen.looked if seen else 0,
            slots=slots,
            room=self.memory.read(max(sizes, default=0), calm=self._is_calm(order, state)),
            lag_s=round(lag_s, 6),
            lag_p99_s=round(lag_p99_s, 6),
            seals=self.sealer.seals,
            privates=self.securer.privates(),
            secured_for=self.securer.secured_for,
            unusable=self.preparation.unusable,
            prepare_error=foreign_text.shortened(failure.error, foreign_text.WHOLE_BYTES),
            prepare_generation=failure.generation,
            prepare_occupied=failure.is_occupied,
            prepare_volume=failure.is_refused_by_volume,
            durable=self.checkpoint_saver.durable,
            unmoved_s=round(self.checkpoint_saver.unmoved_s, 3),
            reading_s=round(self.restorer.unread_s, 3),
            publishing=self.checkpoint_schedule.publishing,
            epoch=self.fence.newest.epoch,
            clock=self._clock,
            drilled=self.drilled.newest,
            told=self.fence.history,
            storage=self.storage_lister.listing if self.storage_lister is not None else None,
            notes=(refused,) if refused else (),
            launcher_unreachable=self.observed.unreachable,
        )
        found = self.neighbours.unreached
        if not found or not names_neighbours:
            return report
        return replace(report, unreached=found, unreached_s=round(self.neighbours.unreached_s, 1))

    def _is_calm(self, order: MemberOrder, state: LauncherState | None) -> bool:
        """Return True if the ranks train and nothing has happened that may lead to a start of ranks."""
        return (
            state is not None
            and may_spare_snapshots(order)
            and not self.observed.stalls
            and all(rank.state == "running" for rank in state.ranks)
        )


def may_spare_snapshots(order: MemberOrder) -> bool:
    """Return True if standbys may copy snapshots, because no recovery needs the slots."""
    return order.do == "run" and order.settled
