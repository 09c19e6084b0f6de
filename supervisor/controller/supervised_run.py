"""Supervise one run until it ends: observe, call `decide`, record the decision, and act on it."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from holdfast.process import event_loop
from holdfast.protocol.drills import DRILLS
from holdfast.protocol.launcher_messages import StartTimes
from supervisor.controller.backend import Backend
from supervisor.controller.drills import Drills, PendingDrill, obstacle
from supervisor.controller.journal_writer import JOURNAL_S, JournalWriter
from supervisor.controller.member_server import MemberServer
from supervisor.controller.records import JobRecords
from supervisor.decision import closing, orders, remedy, transition
from supervisor.decision.decide import decide
from supervisor.decision.durable_facts import with_durable_facts, with_last_status
from supervisor.decision.membership import cut_off_members, departures
from supervisor.decision.redundancy import node_loss
from supervisor.hangs import deadlock, observation
from supervisor.identity_cache import by_identity
from supervisor.observability import incident_record
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.publisher import StatusPublisher
from supervisor.view import failed_start, interrupted_work, members, reports
from supervisor.view.model import (
    ENDING_PHASES,
    Departure,
    End,
    JobState,
    MemberView,
    Policy,
    RunAction,
    Save,
    Secure,
    Settle,
    StallWatch,
    StopRequest,
    View,
    Wait,
    Warn,
)

log = logging.getLogger(__name__)

LATE_NS = 500_000_000  # a wake-up later than this means that this process was stopped
BEAT_S = 0.5  # the longest sleep between decisions; short, so a late wake-up shows how long the stop was
LEAVE_S = 2.0  # the time limit for writing the last records of a run
# A round takes about 50 us per member. After a fault, each report of a large job requires another round. The
# job therefore rests for as long as a round takes. Without this rest, no time would be left to read reports.
LARGE = 200  # the number of members; in a smaller job, a round takes a few milliseconds
REST_S = 50e-6  # per member
SLICE = 50  # members that receive their orders before other work may run: about 1 ms
ROUNDS = 50  # the limit for decisions in a row; more would mean that a decision has no effect and is repeated


class SupervisedRun:
    """Owns the `JobState`. All actions are idempotent, because the next supervisor may repeat them."""

    def __init__(
        self,
        policy: Policy,
        publisher: StatusPublisher,
        backend: Backend,
        member_server: MemberServer,
        records: JobRecords,
        *,
        fresh: bool,
        started_ns: int,
        beat_s: Callable[[], float] = lambda: BEAT_S,
        rack_of: Callable[[str], str] = lambda _node: "",
        paused_s: Callable[[], float] | None = None,
    ) -> None:
        """Continue the run in `records`. If `fresh`, begin a new run there at `started_ns` instead.

        `beat_s` returns the longest sleep until the next decision. `rack_of` returns a node's rack,
        or "" if it is unknown. `paused_s` returns the total time for which this process has read no reports,
        as `event_loop.Lag.paused_s` does; without it, only pauses between two decisions are noticed.
        """
        self._beat_s = beat_s
        self._paused_s, self._discounted_s = paused_s, paused_s() if paused_s is not None else 0.0
        self._rack_of = rack_of
        self.policy = policy
        self.publisher = publisher
        self.backend = backend
        self.member_server = member_server
        self.wake = asyncio.Event()
        self.checkpoints = records.checkpoints(self.wake.set)
        held = records.held
        self.lead = records.lead
        self.lead.raise_above(held.epoch if held else -1)
        self._last = held.decision if held and not fresh else None
        self.memory = _begin(policy, held.memory if held else None, fresh)
        self.bookkeeping = _accounts(started_ns, held.ledger if held and not fresh else None, policy)
        if not fresh:
            self.memory = with_last_status(self.memory, publisher.take_over())
            self.bookkeeping.caught_up(self.memory, time.monotonic_ns())
        self.journal = JournalWriter(records.open_log(), self.memory, self._journal_failed)
        self.ended = asyncio.Event()
        # Set when a sidecar has connected, disconnected or been replaced, because the status must then be
        # updated.
        self.members_changed = asyncio.Event()
        self._sidecars: tuple[tuple[str, bool, int | None], ...] = ()
        self._existed: tuple[str, ...] = ()  # members that the backend has ever reported, except lost ones
        self.drills = Drills()
        self._stop_request: StopRequest = ""  # the request to stop that arrived through the API
        self._unstarted_end: End | None = None  # how the run ends if its ranks were never started
        self._being_recorded: JobState | None = None  # the state after a decision that is not in `memory` yet
        self._deadline_ns = 0
        self._is_waiting = False  # whether `run` waits for its next round
        self._status_is_due = False  # whether the next round publishes a status
        self.status_took_s = 0.0  # how long the last status took to build and publish
        self._step_s = 0.0
        self._room_bytes = 0  # the size of the snapshot for which a standby reserves memory
        self.watch = StallWatch()
        # when the backend was last asked to check each member's sidecar, and to replace it if it is stuck
        self._renewed_ns: dict[str, int] = {}

    # -- the loop

    async def supervise(self) -> None:
        """Decide at every event and deadline until the run has ended.

        Raises `Deposed` if another supervisor has taken over the run.
        """
        if self._last is not None:
            self._record(self._last.view, self._last.action, self._last.after)
        else:
            self._end_unrecorded()
        while True:
            if not self._has_ended:
                await self.reconcile()
            if self._has_ended:
                break
            timeout_s = min(self._beat_s(), max(0.001, (self._deadline_ns - time.monotonic_ns()) / 1e9))
            due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
            self._is_waiting = True
            await event_loop.set_within(self.wake, timeout_s)
            self._is_waiting = False
            late_ns = time.monotonic_ns() - due_ns
            if len(self._sidecars) > LARGE:
                await asyncio.sleep(len(self._sidecars) * REST_S)
            self.wake.clear()
            if self._paused_s is None and late_ns > LATE_NS:
                self._discount(late_ns)
        await self._leave()

    def _discount(self, late_ns: int) -> None:
        """Do not count the time for which this process was stopped: reports have arrived but are unread."""
        self.member_server.discount_own_pause(late_ns)
        self.watch = observation.discount_pause(self.watch, late_ns)

    def _discount_pauses(self) -> None:
        if self._paused_s is not None and (paused_s := self._paused_s()) > self._discounted_s:
            self._discount(int((paused_s - self._discounted_s) * 1e9))
            self._discounted_s = paused_s

    @property
    def _has_ended(self) -> bool:
        return self.memory.phase == "ended"

    @property
    def decided(self) -> JobState:
        """The job's state after its last decision, even if that is still being recorded."""
        return self._being_recorded or self.memory

    async def reconcile(self) -> None:
        self._take_stop()
        await self._stay_ahead()
        decided, most = False, ROUNDS + len(self.memory.placement)  # all members may have to be replaced
        for _ in range(most):
            view = self._observe()
            self.memory = view.memory
            self.bookkeeping.observe(view)
            action = decide(view, self.policy)
            if isinstance(action, Wait):
                self._deadline_ns = action.until_ns
                ledger = self.bookkeeping.ledger.snapshot
                self.journal.write_without_decision(view, self.policy, action, self.memory, ledger)
                break
            await self._commit(view, action)
            decided = True
        else:
            raise RuntimeError(f"{most} decisions in a row without a wait; the last one: {action}")
        self._compare_sidecars(view)
        self.checkpoints.verify(remedy.checkpoint_to_verify(view, self.policy))
        self._renew(view)
        await self._give_orders(view)
        if decided:  # only after the orders are sent, because no member waits for the status
            await asyncio.sleep(0)  # lets the tasks that send the orders run
            self.publish()
        elif self._status_is_due:
            self._publish(view)

    def _compare_sidecars(self, view: View) -> None:
        sidecars = tuple(
            (each.name, each.connected, each.report.sidecar_pid if each.report else None)
            for each in view.members
        )
        if sidecars != self._sidecars:
            self._sidecars = sidecars
            self.members_changed.set()

    async def _stay_ahead(self) -> None:
        """Take an epoch higher than any in the members' reports and the checkpoints.

        If this fails, orders keep the current epoch and the next round tries again. Raises `Deposed` if the
        higher epoch belongs to a supervisor that has taken over the run.
        """
        connections = self.member_server.connections.values()
        reported = (each.report.epoch for each in connections if each.report is not None)
        known = max((self.checkpoints.stored.epoch, *reported))
        if known <= self.lead.epoch:
            return
        try:
            await event_loop.result_of(
                self.journal.thread.submit(lambda: self.lead.raise_above(known), "epoch"), JOURNAL_S
            )
        except OSError as error:
            log.error("epoch not raised", extra={"error": str(error)})

    async def _commit(self, view: View, action: RunAction) -> None:
        """Write the decision to the journal, then update the job's state, which determines the orders."""
        before, after = self.memory, transition.after(view, action, self.policy)
        self._account(view, action, before, after)
        self._being_recorded = after
        try:
            await self.journal.write(view, self.policy, action, after, self.bookkeeping.ledger.snapshot())
        finally:
            self._being_recorded = None
        if self.journal.error and transition.is_resized(before, after):
            return  # the next decision sees that nothing can be recorded, and keeps the size
        if after.since_ns == view.now_ns:  # do not count the wait for the journal against members
            after = replace(after, since_ns=time.monotonic_ns())
        self.memory = after
        for name in set(after.lost) - set(before.lost):
            self.backend.end_member(name)
        self._record(view, action, after)
        if isinstance(action, End):  # no later view contains the ranks' last values
            self._publish(view)
        if isinstance(action, Secure):
            if any(fault.kind == "restore" for fault in action.faults):
                self.checkpoints.doubt()
            elif after.stop or after.end is not None:
                # The final message names checkpoints, so they must exist.
                self.checkpoints.request_rescan()
        if isinstance(action, Warn):
            log.warning("warning to the user", extra={"why": action.why})
        log.info("acted", extra={"action": type(action).__name__, "why": getattr(action, "why", "")})

    def _journal_failed(self, error: str) -> None:
        if self.publisher.journal_error and not error:
            self.wake.set()  # the group may be resized again
        self.publisher.journal_error = error

    def _account(self, view: View, action: RunAction, before: JobState, after: JobState) -> None:
        if isinstance(action, Secure) and after.incident and not _is_same(before, after):
            self._step_s = _usual_step_s(view) or self._step_s
            self.bookkeeping.opened(after.incident, before.incident)
        elif isinstance(action, Settle):
            self.bookkeeping.closed(before, before.incident, _marks(view), self._step_s)
        elif isinstance(action, Save) and (after.finished or after.end is not None):
            is_counted = before.phase == "saving"
            self.bookkeeping.saving(view.now_ns, None if is_counted else before.incident)
        elif isinstance(action, End):
            is_counted = before.phase == "saving" and (before.finished or before.end is not None)
            known = None if is_counted else before.incident  # otherwise, `saving` has counted it
            self.bookkeeping.stopped(view.now_ns, known, finished=closing.is_finish(action))

    def _record(self, view: View, action: RunAction, after: JobState) -> None:
        """Write the incident's file at each decision about it, and in full when the incident has ended.

        The journal is written first, so that a new supervisor can repeat this for the last decision.
        """
        before = view.memory
        known = before.incident if isinstance(action, Settle) else after.incident
        if before.incident and known and not _is_same(before, after) and not isinstance(action, Settle):
            self.publisher.incident(incident_record.superseded(before.incident, known))
        if known is not None:
            marks = _marks(view) if isinstance(action, Settle) else None
            self.publisher.incident(incident_record.record(known, marks))

    def _end_unrecorded(self) -> None:
        """Close the incident records that a predecessor left open although the incidents have ended.

        The predecessor died after it recorded the end of an incident in the job's state, and before it closed
        the incident's record. A Supervision does not contain the last decision, so it cannot be repeated.
        """
        current = incident_record.incident_id(self.memory.incident.number) if self.memory.incident else ""
        found = self.publisher.run.incidents()
        is_over = [each.get("open") is True and each["id"] != current for each in found]
        if any(is_over):
            # Publish all later records again, because the status shows the one published last.
            for each, ends in list(zip(found, is_over, strict=True))[is_over.index(True) :]:
                self.publisher.incident(incident_record.unrecorded_end(each) if ends else each)

    async def _give_orders(self, view: View) -> None:
        """Give each member its order. With many members, other work on the event loop runs in between."""
        policy = self.policy
        if orders.may_create_members(self.memory, time.monotonic_ns()):
            self.backend.want(policy.members + policy.standby, self.memory.lost)
        drilled = {member.name: member.report.drilled for member in view.members if member.report}
        self.drills.update(drilled, self.memory.generation)
        inspection_id = deadlock.inspection_id(view)
        given_to = tuple(self._existed if self.memory.phase == "ended" else self.backend.members)
        leaving = (each.name for each in view.members if each.departure is not None and each.exists)
        given_to = tuple(dict.fromkeys((*given_to, *leaving)))
        for number, name in enumerate(given_to):
            if number and number % SLICE == 0:
                await asyncio.sleep(0)
            given = self.drills.due(name, self.memory.generation)
            order = orders.order_for(self.memory, name, policy, given, inspection_id, self.lead.epoch)
            member = view.member(name)
            if order.do == "idle":
                room_bytes, sources = self._update_room_bytes(view), node_loss.mirrored(view, policy, name)
                order = replace(order, room_bytes=room_bytes, sources=sources)
            elif member is not None and order.do in ("run", "secure"):
                good = interrupted_work.publishable_step(view, member)
                order = replace(order, good=good) if good != order.good else order
            self.member_server.order(name, order)

    def _renew(self, view: View) -> None:
        """Have the backend check silent sidecars, and replace stuck ones, before their members are lost."""
        if self.memory.phase in ENDING_PHASES:
            return
        for name in members.silent_sidecars(view, self._renewed_ns):
            self._renewed_ns[name] = view.now_ns
            self.backend.renew(name)

    def _update_room_bytes(self, view: View) -> int:
        """Update and return the size for which a standby reserves memory: the largest snapshot; 0 if unknown.

        While the group is not training, this is the last known size.
        """
        if self.memory.phase != "running" or not self.memory.settled:
            return self._room_bytes
        self._room_bytes = _largest_snapshot_bytes(view)
        return self._room_bytes

    async def _leave(self) -> None:
        memory = self.memory
        self.bookkeeping.ledger.advance(max(time.monotonic_ns(), self.bookkeeping.ledger.at_ns))
        self.publish()
        self.journal.close()
        for files in (self.journal.thread, self.publisher.files):
            with suppress(OSError):
                await event_loop.result_of(files.submit(_nothing), LEAVE_S)
        self.backend.finish(
            memory.exit_code or 0, closing.summary(memory), memory.message, closing.completion_of(memory)
        )
        self.ended.set()

    # -- publishing

    def publish(self) -> None:
        """Publish the current status; see `StatusPublisher.publish`."""
        self._publish(self.view())

    def publish_next(self) -> None:
        """Publish the view of the next round, which begins now, or publish now if a round is in progress.

        The round needs a view anyway, and building it takes about as long as everything else in both.
        """
        if self._is_waiting:
            self._status_is_due = True
            self.wake.set()
        else:
            self.publish()

    def _publish(self, view: View) -> None:
        began_s = time.perf_counter()
        self._status_is_due = False
        self.publisher.publish(view, self.bookkeeping, self.backend.volume_error)
        self.status_took_s = time.perf_counter() - began_s

    # -- observing

    def _observe(self) -> View:
        """Return the current view. Expect new members; remember existing ones, checkpoints and late ranks."""
        self._discount_pauses()
        for name in self._names():
            self.member_server.connection(name)
        view = self.view()
        if view.memory.phase != "ended":  # members that appear later are not part of this run
            self._existed = self._known_members()
        self.watch = view.watch
        for member in view.members:
            if member.report is not None:
                self.checkpoints.on_report(member.report.durable)
        return view

    def view(self) -> View:
        """Return the current view. This changes nothing."""
        now_ns = time.monotonic_ns()
        leaving = self.backend.departures
        present = self.backend.members
        members = tuple(self._member(name, name in present, now_ns) for name in self._names())
        if leaving:
            members = tuple(self._with_departure(each, leaving.get(each.name)) for each in members)
        unrecorded = bool(self.journal.error)
        view = View(now_ns, time.time(), self.memory, members, self.checkpoints.stored, unrecorded=unrecorded)
        view = departures.without_ended(view, self.policy)
        view = replace(view, memory=with_durable_facts(view), watch=observation.update(self.watch, view))
        return replace(view, memory=cut_off_members.with_unconfirmed_reports(view, self.policy))

    def _names(self) -> Iterable[str]:
        """Return the members of the current view."""
        found = (
            *self.backend.members,
            *self.memory.placement,
            *self._known_members(),
            *self.backend.departures,
        )
        return dict.fromkeys(found)

    def _known_members(self) -> tuple[str, ...]:
        """Return the members that the backend has ever reported, except lost ones.

        A sidecar can connect before the backend lists its member. Such a member must not be considered lost.
        """
        known = dict.fromkeys((*self._existed, *self.backend.members))
        return tuple(name for name in known if name not in self.memory.lost)

    @property
    def existed(self) -> tuple[str, ...]:
        """The members that existed when the run ended, except those already lost."""
        return self._existed

    def _member(self, name: str, is_listed: bool, now_ns: int) -> MemberView:
        line = self.member_server.peek(name)
        exists = is_listed and name not in self.memory.lost
        silent_s = (now_ns - line.heard_ns) / 1e9
        unanswered_s = (now_ns - line.unanswered_ns) / 1e9 if line.unanswered_ns else 0.0
        is_awaited = line.since_ns and not line.first_ns
        awaited_s = (now_ns - line.since_ns) / 1e9 if is_awaited else 0.0
        return MemberView(
            name=name,
            exists=exists,
            connected=line.connected,
            silent_s=round(silent_s, 3),
            report=line.report,
            heard_ns=line.first_ns,
            well_ns=line.well_ns,
            is_listed=is_listed,
            stepped_ns=line.stepped_ns,
            unanswered_s=round(unanswered_s, 3),
            awaited_s=round(awaited_s, 3),
            rack=self._rack_of(line.report.node) if line.report is not None else "",
            back_ns=line.back_ns,
            unreached_ns=line.unreached_ns,
        )

    def _with_departure(self, member: MemberView, departure: Departure | None) -> MemberView:
        is_ending = departure is not None and departure.has_begun and member.name not in self.memory.lost
        return replace(member, departure=departure, exists=member.exists or is_ending)

    def _take_stop(self) -> None:
        for requested in (self.backend.stop, self._stop_request):
            if requested and self.memory.stop != requested:
                self.memory = transition.with_stop_request(self.memory, requested)
        if self._unstarted_end is not None and self.memory.phase == "forming":
            self.memory = replace(self.memory, end=self._unstarted_end)

    # -- requests from outside

    def end_before_start(self, end: End) -> None:
        """End the run because all of its members have ended. Does nothing if ranks were already started."""
        self._unstarted_end = end
        self.wake.set()

    def stop(self, now: bool) -> None:
        """Request the end of the run. If `now`, skip the last checkpoint.

        The backend remembers the request in case this process dies before it is in the journal.
        """
        self._stop_request = "now" if now else self._stop_request or "graceful"
        self.backend.record_stop(self._stop_request)
        self.wake.set()

    def cause_fault(self, what: str, rank: int) -> PendingDrill | None:
        """Cause the fault `what` on `rank` or its member.

        Returns the drill that the member's sidecar still has to carry out; None if the fault has already
        happened. The drill "supervisor" kills this process. Raises `ValueError` if the group is not running
        or has no such rank.
        """
        if self.memory.phase != "running":
            raise ValueError(f"the run is {self.memory.phase}: a drill needs a running group")
        if not 0 <= rank < self.memory.world_size:
            raise ValueError(f"rank {rank}: this run has ranks 0 to {self.memory.world_size - 1}")
        member = self.memory.placement[rank // self.memory.nproc]
        executor = DRILLS[what].executor
        if executor == "supervisor":
            os.kill(os.getpid(), 9)
        if executor == "keeper":
            self.backend.end_member(member)
            return None
        drill = self.drills.ask(member, self.memory.generation, what, rank)
        self.wake.set()
        return drill

    def drill_note(self, what: str, rank: int) -> str:
        """Return why the drill `what` does not take effect now on `rank`, as a clause; "" if it does."""
        return obstacle(self.view(), self.publisher.published, what, rank)


def _accounts(started_ns: int, held: Any, policy: Policy) -> Bookkeeping:
    """Return the accounts from the journal. If they cannot be read, begin new ones at `started_ns`."""
    try:
        return Bookkeeping(started_ns, held, queues=policy.members_created_externally)
    except ValueError as error:
        log.warning("the ledger in the journal cannot be read", extra={"error": str(error)})
        return Bookkeeping(started_ns, None, queues=policy.members_created_externally)


def _begin(policy: Policy, held: JobState | None, fresh: bool) -> JobState:
    """Return the job's initial state: the predecessor's state after a takeover, or the state of a new run.

    A new run in an old directory keeps the generation and the lineage, which makes older states void. It also
    keeps the facts about the state on storage: the steps to skip, the newest step saved, the steps where the
    replicas matched, and the interrupted work that was not repeated.
    """
    world_size = policy.members * policy.nproc
    now_ns = time.monotonic_ns()
    if held is None:
        return JobState(world_size, policy.nproc, since_ns=now_ns)
    if not fresh:
        return transition.taken_over(held, now_ns)
    held = failed_start.state_for_next_run(held)
    return JobState(
        world_size,
        policy.nproc,
        since_ns=now_ns,
        generation=held.generation,
        lineage=held.lineage,
        skip=held.skip,
        incidents=held.incidents,
        before=held.incidents,
        seen=held.seen,
        saved=held.saved,
        equal=held.equal,
        missed=held.missed,
    )


@by_identity(1)
def _largest_snapshot_bytes(view: View) -> int:
    reports = (member.report for member in view.members if member.report is not None)
    return max((snapshot.total_bytes for report in reports for snapshot in report.slots), default=0)


def _is_same(before: JobState, after: JobState) -> bool:
    """True if both states are in the same incident."""
    known, now = before.incident, after.incident
    return known is not None and now is not None and known.number == now.number


def _usual_step_s(view: View) -> float:
    times = [each.step_s for each in reports.last_progress(view) if each.step_s > 0]
    return statistics.median(times) if times else 0.0


def _marks(view: View) -> StartTimes:
    """Return when the last rank reached each stage of the start."""
    found = [
        rank.marks
        for member in view.members
        if member.report is not None and member.report.launcher is not None
        for rank in member.report.launcher.ranks
        if rank.generation == view.memory.generation
    ]
    return StartTimes(
        max(m.started_ns for m in found),
        max(m.joined_ns for m in found),
        max(m.restored_ns for m in found),
        max(m.first_step_ns for m in found),
    )


def _nothing() -> None:
    """Do nothing. When a thread has run this, it has finished all work submitted to it earlier."""
