"""Report the member's state to the supervisor, and carry out the supervisor's newest order.

An order describes the desired state and is valid until the next order replaces it. The sidecar is
level-triggered: after every change, `_pursue` determines what is still missing and takes the next step. A
restarted sidecar needs no saved state for this, because the launcher sends its state again, and the
supervisor its order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.retention import Retention
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.process import clock, event_loop
from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol import defaults
from holdfast.protocol.drills import DRILLS
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from holdfast.protocol.member_messages import (
    MemberAction,
    MemberOrder,
    MemberReport,
)
from holdfast.snapshot import member_directory
from sidecar.clients import LauncherClient, SupervisorClient
from sidecar.config import Config
from sidecar.fencing import CompletedDrills, OrderFence, OrderVersion, unreadable_start
from sidecar.lone_member import LoneMember
from sidecar.member_report import MemberReporter, may_spare_snapshots
from sidecar.rank_preparation import RankPreparation
from sidecar.securing import StateSecurer
from sidecar.standby_copy import StandbyCopier
from sidecar.state.checkpointing import CheckpointSaver, CheckpointSchedule
from sidecar.state.holdings import Holdings
from sidecar.state.memory_limits import MemoryGauge
from sidecar.state.peers import PeerClient
from sidecar.state.piece_sharing import CheckpointSharing
from sidecar.state.piece_writer import PieceWriter
from sidecar.state.restore import Restorer
from sidecar.state.sealing import SnapshotSealer
from sidecar.state.storage_listing import StorageLister
from sidecar.watch.inspection_schedule import InspectionSchedule
from sidecar.watch.member_watch import MemberWatch
from sidecar.watch.neighbour_probe import NeighbourProbe

log = logging.getLogger(__name__)

SOONEST_S = 0.01  # the shortest time between two polls
RETRY_S = 1.0  # the time until work that failed unexpectedly is retried
SAVE_POLL_S = 0.25  # the time between two checks of whether a checkpoint is due
IDLE_POLL_S = 1.0  # the same if none can become due before the next check, or if this member writes none
_SAVE = "save-"  # the prefix of the names of tasks that write a checkpoint


class Sidecar:
    """Runs one sidecar's services, and holds the state that they share."""

    def __init__(self, config: Config, measured: event_loop.Lag | None = None) -> None:
        """`measured` measures the lag of the event loop, which the reports include."""
        self.config = config
        self.holdings = Holdings(config.arena, config.directory / member_directory.RESTORED)
        self.peers = PeerClient(self.holdings, self.peer_token)
        self.launcher = LauncherClient(config.directory / member_directory.LAUNCHER_SOCKET, self._changed)
        self.observed = MemberWatch(config, self.launcher, self._changed)
        self.supervisor = SupervisorClient(
            config.supervisor_url,
            lambda: config.token,
            self.next_report,
            self.obey,
            config.report_s,
            _context(config),
            self.report_unreadable,
        )
        storage = _checkpoint_storage(config)
        self.storage_lister: StorageLister | None = None
        if config.reports_storage:
            self.storage_lister = StorageLister(storage, self._changed, self._answered)
        restorer = Restorer(self.holdings, self.peers, storage)
        self.preparation = RankPreparation(
            restorer, lambda: self.order, self._end_ranks_before, self._start_prepared
        )
        self.fence = OrderFence(config.directory)
        sharing: CheckpointSharing | None = None
        self.pieces: PieceWriter | None = None
        if config.is_pod:  # members on one machine share its disk
            sharing = CheckpointSharing(
                self.peers, config.node, lambda: self.peer_url, lambda: self.fence.newest
            )
            self.pieces = PieceWriter(self.holdings, storage, config.node, lambda: self.fence.newest)
        self.checkpoint_saver = CheckpointSaver(self.holdings, self.peers, storage, sharing)
        self.securer = StateSecurer(
            self.holdings, self.launcher, self.observed, self._send_order, self._changed
        )
        self.copier = StandbyCopier(self.holdings, self.peers, lambda: self.order, self._report_copy)
        self.sealer = SnapshotSealer(self.holdings.arena, self._pace, self.observed.is_final)
        self.checkpoint_schedule = CheckpointSchedule(
            config.member, self.holdings, self.observed.pages, self.checkpoint_saver, self._changed
        )
        self.peer_url = ""
        self.order = MemberOrder("idle", 0)
        if self.pieces is not None:
            self.pieces.note_order(self.order)
        # The grace period of the last stop order that was sent to the launcher.
        self._stop_grace_s = math.inf
        self.refused = ""  # why an order was last refused
        self._inspections = InspectionSchedule()
        self._wake = asyncio.Event()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._drilled = CompletedDrills(config.directory)
        self._lone = LoneMember(self._send_order)
        self._neighbours = NeighbourProbe()
        self._asked_by = 0  # the number of the connection on which a supervisor last named neighbours
        self._reporter = MemberReporter(
            config=config,
            lag=measured,
            launcher=self.launcher,
            observed=self.observed,
            holdings=self.holdings,
            memory=MemoryGauge(config.directory),
            sealer=self.sealer,
            securer=self.securer,
            restorer=restorer,
            preparation=self.preparation,
            checkpoint_saver=self.checkpoint_saver,
            checkpoint_schedule=self.checkpoint_schedule,
            storage_lister=self.storage_lister,
            fence=self.fence,
            drilled=self._drilled,
            neighbours=self._neighbours,
        )

    # -- reporting

    def next_report(self) -> MemberReport:
        """Number and return the next report to the supervisor, which contains the member's complete state."""
        names_neighbours = self._asked_by == self.supervisor.connections
        return self._reporter.next_report(
            self.order, self.peer_url, self.refused, names_neighbours=names_neighbours
        )

    def _changed(self) -> None:
        state = self.launcher.state
        # If the launcher knows a newer epoch, the file with the newest epoch was lost.
        if state is not None and state.epoch > self.fence.newest.epoch:
            self.fence.accept(OrderVersion(state.epoch, 0))
        self.supervisor.dirty.set()
        self._wake.set()

    def _report_copy(self) -> None:
        self.securer.list_again()
        self._changed()

    def peer_token(self) -> str:
        """Return the secret that members present to each other; "" in a pod that has not received it."""
        if self.config.is_pod:
            return self.order.secret
        return self.config.token

    def may_spare_snapshots(self) -> bool:
        """Return True if standbys may copy snapshots, because no recovery needs the slots."""
        return may_spare_snapshots(self.order)

    def _answered(self) -> int:
        """Return the number of the newest save request that has been carried out or has failed."""
        return self.checkpoint_saver.durable.asked

    async def list_storage(self) -> None:
        """List the checkpoints on storage, if the reports include them. Never returns."""
        if self.storage_lister is None:
            await asyncio.Event().wait()
        else:
            await self.storage_lister.run()

    # -- carrying out orders

    async def obey(self, order: MemberOrder) -> None:
        """Make `order` the current order, unless a newer one has already been obeyed."""
        asked = OrderVersion(order.epoch, order.generation)
        why = self.fence.refusal(asked)
        if why:
            self._refuse(why)
            return
        self.fence.accept(asked)
        self.supervisor.alone_since_s = None
        if self.pieces is not None:  # do this first, because the ranks may need the slot that it has pinned
            self.pieces.note_order(order)
        if order.generation != self.order.generation:
            self.preparation.forget_error()
        self.order = order
        if order.neighbours:
            self._asked_by = self.supervisor.connections
        self.checkpoint_schedule.note_order(order)
        lineage = self.fence.learn(order)
        self.checkpoint_saver.retention = Retention(order.keep, lineage, order.proven, order.epoch)
        self._drill()
        self._wake.set()

    def report_unreadable(self, text: str, why: str) -> None:
        """Report that the order in `text` cannot be read, if it starts a generation.

        The supervisor then stops waiting for this member, and tries again or ends the run with the reason. An
        unreadable order to ranks that already run has no effect, because it must not cause a restart.
        """
        asked, state = unreadable_start(text), self.launcher.state
        if asked is None or self.fence.refusal(asked):
            return
        if state is not None and state.generation >= asked.generation:
            return
        self.preparation.refuse(asked.generation, f"the order to start cannot be read: {why}")
        self._changed()

    def _refuse(self, why: str) -> None:
        """Log and report a refused order, once for each reason."""
        if why != self.refused:
            log.warning("order refused", extra={"why": why})
            self.refused = why
            self._changed()

    async def pursue(self) -> None:
        """After every change, take the next step towards the order's desired state. Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._pursue()

    def _pursue(self) -> None:
        order, state = self.order, self.launcher.state
        self._forget_void()
        self._drill()
        if order.do in _PURSUITS:  # a newer supervisor may send an action that this version does not know
            _PURSUITS[order.do](self, order, state)
        if order.save > self.checkpoint_saver.durable.asked:
            self._begin(f"{_SAVE}{order.save}", self.checkpoint_schedule.save_on_request(order))

    def _start_ranks(self, order: MemberOrder, state: LauncherState | None) -> None:
        """Prepare and start the order's ranks. While they run, have the launcher inspect late ranks."""
        if order.launch is None or state is None or state.stopped:  # an ending launcher starts no ranks
            return
        if state.generation < order.generation:
            if not self.preparation.failure.error:
                self._begin(f"prepare-{order.generation}", self.preparation.start_ranks(order))
        elif order.settled:
            self._send_order(LauncherOrder("settle", order.generation))
            if self.preparation.holds_copies(order.generation):
                self._begin(f"copies-{order.generation}", self.preparation.forget_copies(order.generation))
        if state.generation == order.generation:
            self._inspect(state)

    def _secure_state(self, order: MemberOrder, _: LauncherState | None) -> None:
        """Have the ranks secure their state, and watch their tails until the tails end."""
        self.securer.pursue(order)
        if self.securer.followed < order.generation:
            following = self.securer.follow(order.generation, lambda: self.order)
            self._begin(f"tails-{order.generation}", following)

    def _stand_by(self, order: MemberOrder, _: LauncherState | None) -> None:
        """End this member's ranks, which now run on other members, and preallocate memory for a snapshot."""
        self._end_ranks_before(order.generation)
        if self.preparation.lacks_room(order.room_bytes):
            self._begin("room", self.preparation.preallocate(order.room_bytes))

    def _stop(self, order: MemberOrder, state: LauncherState | None) -> None:
        """Pass the stop order to the launcher until it stops, and again if the grace period is shortened."""
        if state is None:
            return
        if not state.stopped or order.grace_s < self._stop_grace_s:
            self._stop_grace_s = order.grace_s
            self._send_order(
                LauncherOrder(
                    "stop",
                    grace_s=order.grace_s,
                    ending_only=order.ending_only,
                    first=order.first,
                    exit_code=order.exit_code,
                )
            )

    def _begin(self, name: str, work: object) -> None:
        """Start `work`, unless work with this `name` is in progress. The next change tries again."""
        assert asyncio.iscoroutine(work)
        if name in self._busy:
            work.close()
            return
        task = asyncio.create_task(work, name=name)
        self._busy[name] = task
        task.add_done_callback(lambda done: self._work_ended(name, done))

    def _work_ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._busy[name]
        if name.startswith(_SAVE):
            self._list_soon()
        if task.cancelled() or task.exception() is None:
            self._changed()
            return
        log.error("task failed", extra={"task": name}, exc_info=task.exception())
        asyncio.get_running_loop().call_later(RETRY_S, self._changed)

    def _start_prepared(self, order: LauncherOrder) -> None:
        """Send the launcher the order to start ranks whose states are restored."""
        self.observed.forget_stalls()
        self._send_order(order)

    def _send_order(self, order: LauncherOrder) -> None:
        self.launcher.send(replace(order, epoch=self.fence.newest.epoch))

    def _end_ranks_before(self, generation: int) -> None:
        """Kill the ranks of older generations."""
        state = self.launcher.state
        if state is None or state.generation >= generation:
            return
        if any(rank.state != "exited" for rank in state.ranks):
            self._send_order(LauncherOrder("kill", state.generation))

    def _drill(self) -> None:
        """Carry out the order's drill once the order's ranks exist, and never repeat it."""
        drill, state = self.order.drill, self.launcher.state
        if drill is None or drill.number <= self._drilled.newest or state is None:
            return
        if self.order.do == "run" and state.generation != self.order.generation:
            return
        self._drilled.remember(drill.number)
        self.supervisor.dirty.set()
        if DRILLS[drill.what].executor == "sidecar":
            os.kill(os.getpid(), signal.SIGKILL)
            # The first process of a container cannot kill itself with a signal.
            os._exit(128 + signal.SIGKILL)
        for rank in state.ranks:
            if rank.rank == drill.rank:
                self._send_order(
                    LauncherOrder("drill", rank.generation, local_rank=rank.local_rank, what=drill.what)
                )

    # -- watching

    async def watch(self) -> None:
        """Poll the pages and the launcher at each tick, and when a rank reaches its limit. Never returns.

        The lateness of this process is not held against the ranks and the launcher, because they did not
        cause it.
        """
        while True:
            wait_s = min(seconds_to_next_tick(self.config.poll_s), max(self.observed.pages.left_s, SOONEST_S))
            due = time.monotonic() + wait_s
            await asyncio.sleep(wait_s)
            now = time.monotonic()
            lateness_s = max(0.0, now - due - clock.NORMAL_LATENESS_S)
            self._poll(now, lateness_s)

    def _poll(self, now_s: float, lateness_s: float) -> None:
        if self.order.do != "stop":  # a launcher that is ending may be silent
            self.observed.poll_launcher(now_s, lateness_s)
            self.observed.poll_connection(now_s)
        self.observed.poll_ranks(self.order, lateness_s)
        if self.config.is_pod:  # on a single machine, the keeper restarts the supervisor
            launch, state = self.order.launch, self.launcher.state
            grace_s = launch.grace_s if launch is not None else defaults.GRACE_S
            self._lone.poll(state, self.supervisor.alone_since_s, grace_s, now_s, lateness_s)
        self._forget_void()
        self._probe_neighbours(now_s)
        state = self.launcher.state
        if state is not None and self.order.do == "run":
            self._inspect(state)

    def _probe_neighbours(self, now_s: float) -> None:
        """Attempt to reach the neighbours while the ranks run and are held up."""
        order, is_late = self.order, any(not each.early_s for each in self.observed.stalls)
        neighbours = order.neighbours if order.do == "run" else ()
        probe = self._neighbours
        if probe.take_turn(order.generation, neighbours, now_s, is_late=is_late, settled=order.settled):
            work = probe.probe(neighbours, now_s, order.must_reach, order.must_confirm)
            self._begin("neighbours", work)

    def _forget_void(self) -> None:
        """Discard the snapshot of a void step, whose state a rank on some member changed after the commit.

        If the snapshot is being read, a later call discards it. Until then, the supervisor knows that it must
        not resume from the snapshot. If the member holds only one snapshot, it is kept, because a void state
        is better than none. The rank that took a discarded snapshot notices that it is gone and takes
        another. The member reports void steps immediately, so that the other members soon know about them.
        """
        void = self.observed.poll_void_steps(self.order)
        records = self.holdings.arena.records() if void else ()
        for record in records if len(records) > 1 else ():
            if record.generation == self.order.generation and record.step in void:
                self.holdings.arena.forget(record)
                return

    def _inspect(self, state: LauncherState) -> None:
        """Have the launcher inspect its ranks while any of them, or a rank on another member, is late."""
        inspection_id = self.order.look if self.order.do == "run" else 0
        number = self._inspections.advance(
            self.observed.needs_inspection(self.order), state.looked, time.monotonic(), inspection_id
        )
        if number:
            self._send_order(LauncherOrder("look", state.generation, look=number, asked=inspection_id))

    # -- saving

    async def seal(self) -> None:
        """Seal new snapshots until cancelled."""
        await self.sealer.run()

    def _pace(self) -> tuple[int, float]:
        every = self.order.launch.snapshot_every if self.order.launch is not None else 0
        return max(every, 0), self.observed.pages.step_s()

    async def save(self) -> None:
        """While this member hosts rank 0, write a checkpoint after each interval. Runs until cancelled."""
        while True:
            is_near = (
                self._hosts_rank_0() and self.checkpoint_schedule.left_s(time.monotonic()) < 2 * IDLE_POLL_S
            )
            await asyncio.sleep(seconds_to_next_tick(SAVE_POLL_S if is_near else IDLE_POLL_S))
            if self._hosts_rank_0() and await self.checkpoint_schedule.save_if_due(
                self.order, time.monotonic()
            ):
                self._list_soon()
                self._changed()

    def _list_soon(self) -> None:
        if self.storage_lister is not None:
            self.storage_lister.request()

    def _hosts_rank_0(self) -> bool:
        state = self.launcher.state
        return state is not None and any(each.rank == 0 for each in state.ranks)


_PURSUITS: Mapping[MemberAction, Callable[[Sidecar, MemberOrder, LauncherState | None], None]] = (
    MappingProxyType(
        {  # the method that takes the next step of each action; drills and saves are independent of it
            "run": Sidecar._start_ranks,
            "secure": Sidecar._secure_state,
            "idle": Sidecar._stand_by,
            "stop": Sidecar._stop,
        }
    )
)


def _checkpoint_storage(config: Config) -> CheckpointStorage:
    """Return the storage for checkpoints. Load the library for object storage only if it is needed."""
    location = config.objects
    if location is None:
        return DirectoryStorage(config.checkpoint_directory)
    from sidecar.storage.object_client import ObjectClient
    from sidecar.storage.object_storage import ObjectStorage

    return ObjectStorage(location, lambda: ObjectClient(location, os.environ), config.checkpoint_directory)


def _context(config: Config) -> ssl.SSLContext | None:
    """Return a TLS context that verifies the supervisor; None for plain HTTP or the system's certificates."""
    return ssl.create_default_context(cadata=config.certificates) if config.certificates else None
