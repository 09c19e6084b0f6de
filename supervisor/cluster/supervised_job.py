"""Supervise one job of a cluster for the term of one leader.

A Supervision can outlive several runs of its job. When an owner restarts a failed job, it creates new pods
after the old ones were ordered to end, and a user can recreate pods without an owner under the same name.
Each run has its own `SupervisedRun`, which continues from the previous run's state.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from holdfast import exit_codes
from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop, logs
from holdfast.protocol.member_messages import MemberOrder
from supervisor.cluster import succession
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.departures.evictions import JobEvictions
from supervisor.cluster.departures.job_departures import JobDepartures
from supervisor.cluster.hardware.evidence import HardwareEvidence
from supervisor.cluster.host_probe import ProbedMember
from supervisor.cluster.job_takeover import JobTakeover
from supervisor.cluster.missed.notes import MissedNotes
from supervisor.cluster.missed.rule import MissingMembers, missing_members
from supervisor.cluster.pod_groups import SIZE_KEPT
from supervisor.cluster.pod_server import PodServer, job_secret
from supervisor.cluster.pods import PodBackend, PodGroup, PodMember
from supervisor.cluster.reach import Reach
from supervisor.cluster.requested_drills import RequestedDrills
from supervisor.cluster.run_summary import RETRY_S, RunSummary
from supervisor.cluster.standbys.cluster_room import ClusterRoom, IdleStandby
from supervisor.cluster.standbys.standby_pods import StandbyNeeds, StandbyPods
from supervisor.cluster.supervision import status_fields
from supervisor.cluster.supervision.contents import RunSize
from supervisor.cluster.supervision.fenced_records import SupervisionRecords
from supervisor.cluster.supervision.job_events import JobEvents
from supervisor.cluster.supervision.requested_stop import RequestedStop, record_stop
from supervisor.cluster.supervision.resource import (
    Takeover,
    run_has_ended,
)
from supervisor.cluster.supervision.status_events import StatusEvents
from supervisor.controller.limits.owner import ReportOwner
from supervisor.controller.limits.shared import SharedLimits
from supervisor.controller.member_server import largest_report
from supervisor.controller.reported_storage import ReportedStorage
from supervisor.controller.reports.routine_reports import is_calm
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.decision import orders
from supervisor.kubernetes.client import ApiServer, KubernetesObject
from supervisor.kubernetes.events import EventRecorder
from supervisor.kubernetes.watch import ObjectName
from supervisor.observability.incident_record import incident_id
from supervisor.observability.publisher import StatusPublisher
from supervisor.observability.recent_status import RecentStatus
from supervisor.quarantine.model import RunFault
from supervisor.store.run_lead import Deposed
from supervisor.view.model import ENDING_PHASES, JobState, Policy, StopRequest

log = logging.getLogger(__name__)

BUSY_S = 1.0  # the longest time between two rounds of a job
# Replaces `BUSY_S` while the group trains well, or has no ranks yet. A deadline or a non-routine report ends
# this wait early.
CALM_S = 4.0
POLL_S = 1.0  # the time between two checks for pods of a new run


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """The objects and settings that all jobs of one leader share."""

    server: ApiServer
    events: EventRecorder
    records: StorageThread  # stores the statuses and incidents of all jobs
    epoch: int  # the leader's epoch
    secret: bytes  # each job's secret is derived from this
    lag: Callable[[], tuple[float, float]]
    evict: Callable[[str, PodMember], None]  # evicts a pod of the given namespace
    is_out_of_reach: Callable[[str], bool] = lambda _: (
        False
    )  # True if this leader may not reach the namespace
    jobs: Callable[[], int] = lambda: 1  # the number of all jobs
    term_left_s: Callable[[], float] = lambda: math.inf  # how long this leader certainly still leads
    limits: SharedLimits = field(default_factory=SharedLimits)  # all jobs share the event loop
    rack_of: Callable[[str], str] = lambda _: ""  # the rack of a node; "" if it is unknown
    # records a fault that a node's hardware explains; calling it again changes nothing
    note_run_fault: Callable[[str, RunFault], None] = lambda _node, _fault: None
    may_order: Callable[[], bool] = lambda: True  # False until a process that was suspended knows its term
    paused_s: Callable[[], float] | None = None  # the total time for which this process has read no events
    room: ClusterRoom | None = None  # for standbys; without it, no standby is created


class SupervisedJob:
    """Supervises one job until `close`. `backend` manages its pods."""

    def __init__(self, context: ClusterContext, group: PodGroup) -> None:
        self.key: JobKey = group.key
        self.group = group
        self.was_seen = False  # the resource has existed, so if it is missing now, it was deleted
        self.is_at_rest = False  # the job's last run has ended, and its end is recorded
        self.has_ended = False  # the supervision has ended, because another supervisor has taken over the job
        secret = job_secret(context.secret, group.key)
        self._server = PodServer(
            self._wake,
            secret,
            self._is_calm,
            context.limits,
            ReportOwner(group.key.namespace, _name(group.key)),
            self._report_refusal,
            context.may_order,
        )
        self._events = JobEvents(context.events, group.key)
        self._takeover = JobTakeover(context.server, context.epoch, context.term_left_s, self._events)
        self._evictions = JobEvictions(
            lambda pod: context.evict(group.key.namespace, pod),
            lambda: self._server.has_heard,
            lambda: context.is_out_of_reach(group.key.namespace),
            self._events,
        )
        self.backend = PodBackend(
            self._evictions.evict,
            self._dismiss,
            self._stop_requested,
            time.monotonic,
            responds=self._server.responds,
            blocked=self._evictions.why_blocked,
            report_blocked=self._evictions.report_blocked,
            ends_with_its_pods=not group.key.uid,
        )
        self.run: SupervisedRun | None = None
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_run_members: frozenset[str] = frozenset()  # the members of the run that has ended
        self._earlier: frozenset[str] = frozenset()  # the pods that had ended when the run began
        self._stop = RequestedStop()
        self._records: SupervisionRecords | None = None  # of the current run
        self._summary: RunSummary | None = None  # of the current run
        self._status_events = StatusEvents()
        self._seen_uid: object = None  # the resource's uid, as last seen
        self._drills = RequestedDrills(context.server, lambda: self.run, self._evict_member)
        self._has_work = asyncio.Event()  # there is a pod that has not ended, or a standby to delete
        self._standbys = StandbyPods(
            context.server,
            group.key.namespace,
            self._standby_needs,
            context.term_left_s,
            lambda reason, message, bad: self._events.record(reason, message, bad=bad),
            context.room or ClusterRoom(context.server),
            self._withdraw_standby,
        )
        self._departures = JobDepartures(self.backend, self._evictions, self._events, self._wake)
        self._evidence = HardwareEvidence(f"{group.key.namespace}/{group.key.name}", context.note_run_fault)
        self.missed = MissedNotes()
        self._updated = asyncio.Event()  # set by `update`
        self._stated: RunSize | None = None  # the size of the job when it was last compared with the run's

    # -- called by the registry

    def start(self) -> None:
        """Begin to supervise in the background. All log lines of this work contain the job."""
        token = logs.CONTEXT.set({"job": f"{self.key.namespace}/{self.key.name}"})
        self._spawn(self._supervise(), "supervise")
        self._spawn(self._standbys.run(), "standbys")
        logs.CONTEXT.reset(token)

    def update(self, group: PodGroup) -> None:
        """Set the current pods and settings. A changed size or policy takes effect with the next run."""
        self.group = group
        self._updated.set()
        self.update_pods(group.pods)
        self._compare_sizes()

    def update_pods(self, pods: Iterable[PodMember]) -> None:
        """Set the current pods."""
        if self.backend.update(pods):
            self._wake()
        pods = self.backend.pods.values()
        self._evidence.locate({pod.member: pod.node for pod in pods})
        if all(pod.has_ended and not self._is_to_be_deleted(pod) for pod in pods):
            self._has_work.clear()
        else:
            self._has_work.set()
        self.note_departures()
        present = {pod.member for pod in self.backend.pods.values()}
        if self.run is not None:  # lost members are no longer needed
            present |= {*self.run.memory.placement, *self.run.existed} - {*self.run.memory.lost}
        self._server.keep(present)

    def note_departures(
        self,
        nodes: Mapping[ObjectName, KubernetesObject] | None = None,
        heeded: frozenset[str] | None = None,
    ) -> None:
        """Update which members are about to end, and evict pods without ranks that must leave.

        Call this regularly, because some announcements take effect only after a while. `nodes` contains the
        Node objects that are known now. `heeded` contains the names of the nodes whose agent's verdict moves
        members.
        """
        self._departures.update_nodes(nodes, heeded)
        self._departures.observe(self.run.memory if self.run is not None else None)

    def leave(self, node: str, why: str) -> None:
        """Move the members that are now on a node to standbys, and then evict their pods. Idempotent.

        Without a standby, a member stays and keeps its ranks until a standby is ready. `why` is a clause.
        """
        self._departures.leave(node, why)
        self.note_departures()

    def members_on(self, node: str) -> int:
        """Return the number of this job's pods on a node, without pods that have ended."""
        return sum(pod.node == node and not pod.has_ended for pod in self._pods)

    def idle_standbys(self) -> list[IdleStandby]:
        """Return the standbys that may yield to another pod of the cluster now."""
        return self._standbys.idle()

    def was_replaced(self, uid: object) -> bool:
        """Return True if the resource with this uid has replaced an earlier one.

        A resource that this job has just taken over does not count, even if the registry has not seen it yet.
        """
        resource = self._takeover.resource
        taken = resource.uid if resource is not None else None
        return self._seen_uid is not None and uid not in (self._seen_uid, taken)

    def update_spec(self, spec: object, uid: object = None) -> None:
        """Carry out users' requests in the spec of the resource with this uid."""
        self.was_seen = True
        self._seen_uid = uid
        wanted: Mapping[str, Any] = spec if isinstance(spec, Mapping) else {}
        self._stop.update(wanted)
        stop = self._stop.current
        if stop and self.backend.user_stop != stop:
            self.backend.user_stop = stop
            self._wake()
        elif not stop and self.is_at_rest:  # the user has removed the request, so the next pods may train
            self.backend.user_stop = ""
        self._drill(wanted.get("drill"))

    @property
    def is_unneeded(self) -> bool:
        """True if the job is at rest and all of its pods have ended.

        A supervised job takes 120 KiB and a task, and there may be thousands of jobs that have ended. If
        another pod of this job appears, a new `SupervisedJob` continues from the resource, as another leader
        would.
        """
        return self.is_at_rest and not self._has_work.is_set()

    @property
    def reach(self) -> Reach:
        """How many of the job's members were ever connected, and how many of them are connected now.

        Only members that had connected to this leader or an earlier one have ranks in the job's state.
        """
        running = [pod.member for pod in self.backend.pods.values() if pod.is_running and not pod.is_leaving]
        placed = self.run.memory.placement if self.run is not None else ()
        lines = {member: self._server.connections.get(member) for member in running}
        connected = {member for member, line in lines.items() if line is not None and line.connected}
        known = {member for member, line in lines.items() if line is not None and line.first_ns}
        return Reach(len(known | connected | {*running} & {*placed}), len(connected))

    @property
    def missing(self) -> MissingMembers | None:
        """The members that the job lacks; None if it lacks none, ends, or this process lost it."""
        if self.run is None or self.is_at_rest or self.has_ended:
            return None
        is_stopping = bool(self._stop.current or self.backend.stop)
        return missing_members(self.run.memory, self.run.policy, self._pods, is_stopping=is_stopping)

    @property
    def supervision(self) -> tuple[str, str]:
        """The name and the uid of the job's Supervision, once the job is taken over."""
        resource = self._takeover.resource
        return (resource.name, str(resource.uid)) if resource is not None else ("", "")

    @property
    def open_incident(self) -> str:
        """The ID of the open incident; "" if there is none."""
        opened = self.run.memory.incident if self.run is not None else None
        return incident_id(opened.number) if opened is not None else ""

    def record(self, reason: str, message: str, bad: bool) -> None:
        """Record an event about the job."""
        self._events.record(reason, message, bad=bad)

    @property
    def standbys_missing(self) -> int:
        """How many standbys the job wants that are not ready; 0 unless it trains."""
        if self.run is None or self.is_at_rest or self.run.memory.phase != "running":
            return 0
        members = self.run.publisher.published.get("members") or ()
        ready = sum(1 for each in members if each["role"] == "standby" and each["parked"])
        return max(0, self.run.policy.standby - ready)

    @property
    def probed(self) -> Iterable[ProbedMember]:
        """The members whose hosts must be probed: those that have ranks, or have reported to this leader."""
        if self.run is None or self.is_at_rest:
            return ()
        lines, placed = self._server.connections, self.run.memory.positions
        return (
            ProbedMember(pod.uid, pod.address, pod.node, self, line, self._wake)
            for pod in self.backend.pods.values()
            if pod.address and pod.is_running
            if (line := lines.get(pod.member)) is not None and (line.first_ns or pod.member in placed)
        )

    async def close(self) -> None:
        """End all work on the job without changing the job. Its pods continue to train.

        Each member's connection ends at its next report, which makes it connect to the next supervisor.
        """
        try:
            await event_loop.end(self._tasks)
        finally:  # even if the caller is cancelled, because no process would receive the reports
            # This must be last, because a running job would mistake it for the loss of all members.
            self.backend.update(())
            self._server.close()

    async def serve(self, request: web.Request, uid: str) -> web.StreamResponse:
        """Serve the connection of the pod `uid`, under the name of its member."""
        return await self._server.serve(
            request,
            lambda: self.backend.member_of(uid),
            largest_report(self.group.nproc),
            lambda report: self.backend.why_not_at(uid, report.peer_url),
        )

    # -- the run

    async def _supervise(self) -> None:
        """Supervise one run after another, until cancelled or deposed."""
        fresh = False
        since_s = time.monotonic()
        try:
            while True:
                try:
                    if not self._has_work.is_set() and await run_has_ended(self._context.server, self.key):
                        self.is_at_rest = True  # nothing is left to do, and nothing to write
                        await self._has_work.wait()
                        self.is_at_rest = False
                    found = await self._takeover.take_over(self.group)
                    state = found.state
                    if state is not None and succession.is_new_run(state.memory, self.key, self._pods):
                        await self._forget_stop(found.epoch)
                        fresh = True
                    # Decide this before the first round, which would make the new pods members of the old
                    # run.
                    fresh = fresh or state is None or self._is_of_another_size(state.memory)
                    policy = await self._takeover.policy(self.group, found, fresh)
                except Deposed as error:  # taking over again would depose the successor
                    await self._yield_to(error)
                    return
                except Exception as error:
                    await asyncio.sleep(self._takeover.note_failure(error, time.monotonic() - since_s))
                    continue
                try:
                    is_over = await self._run(found, policy, fresh)
                except Deposed as error:
                    await self._yield_to(error)
                    return
                except Exception:  # other jobs must not be affected; this job's members continue to train
                    log.exception("job failed")
                    await asyncio.sleep(RETRY_S)
                    fresh = False
                else:
                    fresh = not is_over or await self._next_run()
                since_s = time.monotonic()
        finally:
            self.has_ended = True

    async def _yield_to(self, successor: Deposed) -> None:
        log.warning("another supervisor leads this job", extra={"why": str(successor)})
        await asyncio.sleep(RETRY_S)

    @property
    def _pods(self) -> Collection[PodMember]:
        return self.backend.pods.values()

    def _is_to_be_deleted(self, pod: PodMember) -> bool:
        """Return True for a standby that has ended, unless it trained until the end."""
        if not pod.is_standby or pod.is_leaving or self.run is None:
            return False
        return pod.member not in self.run.memory.placement

    def _standby_needs(self) -> StandbyNeeds | None:
        run, resource = self.run, self._takeover.resource
        if run is None or resource is None or not isinstance(resource.uid, str) or self.has_ended:
            return None
        leaving = self.backend.departures.keys()
        return StandbyNeeds(
            run.decided, run.policy, self._pods, resource.name, resource.uid, leaving, self.group.queue
        )

    def _withdraw_standby(self, uid: str, is_going: bool) -> None:
        self.backend.withdraw(uid, is_going)
        self._wake()

    def _is_of_another_size(self, memory: JobState) -> bool:
        return self.group.size != RunSize.of(memory) and succession.is_abandoned(memory, self._pods)

    async def _forget_stop(self, epoch: int) -> None:
        """Remove a request to stop that was for an earlier run. Raises `Deposed`."""
        assert self._takeover.resource is not None  # because the job was taken over
        await self._stop.remove(self._takeover.resource, epoch)
        self.backend.user_stop = ""

    async def _run(self, found: Takeover, policy: Policy, fresh: bool) -> bool:
        """Supervise one run to its end. Raises `Deposed`.

        Returns False if the run did not end, but is replaced by a run of another size (`_await_new_size`).
        """
        run, summary = self._begin_run(found, policy, fresh)
        if found.is_over and not fresh:  # nothing is left to decide, and the last status is recorded
            self._end_members(run)
            return True
        if fresh:
            await summary.announce()
        self._events.record("Supervised", f"supervised with {_size(policy)}")
        self._stated = None
        self._compare_sizes()
        await event_loop.until_one_ends(
            run.supervise(),
            run.checkpoints.run(),
            summary.publish_changes(),
            summary.write_regularly(),
            self._await_new_size(run),
            self._watch_for_end_before_start(run),
        )
        if not run.ended.is_set():
            return False
        self._end_members(run)
        await summary.record_end()
        return True

    def _begin_run(self, found: Takeover, policy: Policy, fresh: bool) -> tuple[SupervisedRun, RunSummary]:
        """Create the run, its records and its summary. They continue from what `found` contains."""
        assert self._takeover.resource is not None
        records = self._records = SupervisionRecords(
            self._takeover.resource,
            found,
            lambda changed: ReportedStorage(self._server.reports, changed, is_durable=policy.has_storage),
            self._context.may_order,
        )
        publisher = self._make_publisher(found, policy, fresh, records)
        self._standbys.restore(found.standbys)
        self.backend.ended = None
        if not self.was_seen:  # if it was seen, the mirror is newer
            self._stop.begin(found.spec)
        run = self.run = SupervisedRun(
            policy,
            publisher,
            self.backend,
            self._server,
            records,
            fresh=fresh,
            started_ns=time.monotonic_ns(),
            beat_s=lambda: CALM_S if self._is_calm() else BUSY_S,
            rack_of=self._context.rack_of,
            paused_s=self._context.paused_s,
        )
        self._summary = RunSummary(run, records, self._context.jobs, self._standbys.shown, self.missed)
        return run, self._summary

    def _make_publisher(
        self, found: Takeover, policy: Policy, fresh: bool, records: SupervisionRecords
    ) -> StatusPublisher:
        history = self._evidence.begin_run(() if fresh else found.recent)
        recent = RecentStatus(
            _name(self.key),
            status_fields.MAX_RECENT,
            found.view,
            found.recent,
            history.with_hardware,
        )
        return StatusPublisher(
            recent,
            self._context.lag,
            policy,
            records.lead,
            files=self._context.records,
            published=self._note_published,
        )

    def _compare_sizes(self) -> None:
        """Record an event if the job's size differs from its current run's size, once for each size."""
        run, stated = self.run, self.group.size
        if run is None or not run.memory.placement or run.memory.phase in ENDING_PHASES:
            return
        size = _size(run.policy)
        if stated != size and stated != self._stated:
            why = f"the job now has {stated}, but the current run keeps {size} until it ends"
            self._events.record(SIZE_KEPT, why, bad=True)
        self._stated = stated

    async def _await_new_size(self, run: SupervisedRun) -> None:
        """Return when the job's size differs from its run's, and the run no longer needs to keep its size.

        A run needs to keep its size from the first start of its ranks until all of its pods are gone.
        """
        while True:
            if self.group.size == _size(run.policy):
                self._updated.clear()
                await self._updated.wait()
                continue
            await asyncio.sleep(POLL_S)
            stated, memory = self.group.size, run.memory
            if stated == _size(run.policy) or memory.phase in ENDING_PHASES or not self.backend.pods:
                continue
            if succession.may_change_size(run.view(), self._pods):
                log.info(
                    "size of the job changed", extra={"before": str(_size(run.policy)), "now": str(stated)}
                )
                return

    async def _watch_for_end_before_start(self, run: SupervisedRun) -> None:
        """End the run if all of its pods end before its ranks are started. Never returns.

        This happens, for example, if the launchers refuse a script that does not exist.
        """
        ended: dict[str, PodMember] = {}  # the run's pods that have ended, even if they are gone
        since_s = time.monotonic()  # when the run last had a pod that had not ended
        while run.memory.phase == "forming":  # a run never returns to this phase
            pods = [pod for pod in self._pods if not (pod.uid in self._earlier or pod.is_standby)]
            ended |= {pod.uid: pod for pod in pods if pod.has_ended and not pod.is_leaving}
            now_s = time.monotonic()
            if any(not pod.has_ended for pod in pods):
                since_s = now_s
            found = succession.end_before_start(ended.values(), pods, run.policy.members, now_s - since_s)
            if found is not None:
                run.end_before_start(found)
            await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()

    def _end_members(self, run: SupervisedRun) -> None:
        """Order all members of the run to end, including members that connect later.

        Pods that appeared after the run's last decision belong to the owner's next attempt, and not to this
        run.
        """
        ended = self.backend.ended
        if ended is not None:
            self._events.record(
                "Finished", f"{ended.why} (exit code {ended.exit_code})", bad=ended.exit_code != 0
            )
        memory = run.memory
        self._last_run_members = frozenset(
            {*memory.placement, *memory.bystanders, *memory.lost, *run.existed}
        )
        for member in self._last_run_members:
            order = orders.order_for(run.memory, member, run.policy, None, epoch=run.lead.epoch)
            self._server.order(member, order)

    async def _next_run(self) -> bool:
        """Wait for pods that did not belong to the run that has ended. Return True when they form a new run.

        After a failure, such pods are the owner's next attempt. After a success, they are pods whose
        containers had already finished and were restarted, so they are ordered to end. While the request to
        stop is in the resource, the owner's next pods are ordered to end too, and the status remains that of
        the stopped run. Pods without an owner form a new run if no pod of the previous run is left.
        """
        run = self.run
        assert run is not None
        self.is_at_rest = True
        while True:
            await asyncio.sleep(POLL_S)
            new = set(self.backend.members) - self._last_run_members
            if not new:
                continue
            standbys = {pod.member for pod in self._pods if pod.is_standby}
            is_next_attempt = run.memory.exit_code and not self._stop.current and not new <= standbys
            if is_next_attempt or (
                not self.key.uid and succession.are_gone(self._last_run_members, self._pods)
            ):
                self.is_at_rest = False
                self._earlier = frozenset(pod.uid for pod in self._pods if pod.has_ended)
                return True
            self._last_run_members |= new
            for member in new:
                order = orders.order_for(run.memory, member, run.policy, None, epoch=run.lead.epoch)
                self._server.order(member, order)

    def _note_published(self) -> None:
        assert self.run is not None
        assert self._summary is not None  # because the run has published a status
        self._evidence.observe(self.run.memory, ((pod.address, pod.node) for pod in self._pods))
        for reason, message in self._status_events.observe(self.run.publisher.published):
            self._events.record(reason, message, bad=True)
        if self._summary.note_published():
            self._compare_sizes()

    def _report_refusal(self, why: str) -> None:
        self._events.record("ReportRefused", f"a member's connection was ended: {why}", bad=True)

    # -- requests

    def _drill(self, wanted: object) -> None:
        """Begin a drill that a user has requested in the resource, once for each number."""
        resource = self._takeover.resource
        if self._records is None or resource is None:
            return  # the job is not taken over yet, and the registry calls this again soon
        drill = self._drills.begin(wanted)
        if drill is not None:
            self._spawn(self._drills.carry_out(drill, resource, self._records), "drill")

    def _evict_member(self, member: str) -> None:
        for pod in self.backend.pods.values():
            if pod.member == member:
                self._evictions.evict(pod)

    def _stop_requested(self, how: StopRequest) -> None:
        resource = self._takeover.resource
        if resource is not None and self._records is not None:
            self._spawn(record_stop(resource, self._records, how), "stop")

    def _dismiss(self, member: str) -> None:
        if self.run is not None:
            memory, epoch = self.run.memory, self.run.lead.epoch
            order = MemberOrder("stop", memory.generation, epoch=epoch, exit_code=exit_codes.TERMINATED)
            self._server.order(member, order)

    def _is_calm(self) -> bool:
        return self.run is not None and is_calm(self.run.memory, self.run.watch)

    def _wake(self) -> None:
        if self.run is not None:
            self.run.wake.set()

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"{name} {self.key.name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task failed", extra={"task": task.get_name()}, exc_info=task.exception())


def _size(policy: Policy) -> RunSize:
    return RunSize(policy.members, policy.nproc)


def _name(key: JobKey) -> str:
    return hashlib.sha256(json.dumps([key.namespace, key.name, key.uid]).encode()).hexdigest()[:32]
