"""One job of a cluster, for the term of one leader: its pods, its members' connections, its `Job`.

A Supervision may outlive several runs of its job: when the owner restarts a failed job, it creates new pods
after the old ones were ordered to end. Each run has its own `Job`, and continues from the state of the
previous run.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from holdfast.process import event_loop, logs
from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol.drills import DRILLS
from holdfast.protocol.member_messages import MemberOrder, MemberReport
from supervisor.cluster import supervision
from supervisor.cluster.job_membership import JobKey
from supervisor.cluster.pods import PodBackend, PodGroup, PodMember, Reach
from supervisor.cluster.reported_storage import ReportedStorage
from supervisor.cluster.supervision import (
    SupervisionRecords,
    SupervisionResource,
    Takeover,
)
from supervisor.controller.job import Job
from supervisor.controller.member_server import MemberConnection, MemberServer, largest_report
from supervisor.decision import orders
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import ApiError
from supervisor.kubernetes.events import EventRecorder, ObjectReference
from supervisor.observability.publisher import StatusPublisher
from supervisor.store.leadership import Deposed
from supervisor.store.run_directory import RunDir
from supervisor.view.model import StopRequest

log = logging.getLogger(__name__)

AGAIN_S = 2.0  # until a failed request to the API server is retried
DISMISSED = 143  # exit code for a pod that is deleted: with 0, a Kubernetes Job would count a success
COME_S = 30.0  # for members to connect to a new supervisor
STATUS_S = 0.5  # between two statuses
SUMMARY_S = 5.0  # between two writes of the summary into the resource, if the phase stays the same
SPACING_S = 0.05
READ_S = 5.0  # for reading incidents back from the local directory
_INCIDENT = re.compile(r"i-[0-9]{1,19}")  # an id, which becomes the name of a file
POLL_S = 1.0  # between two checks for pods of a new run
_NOT_REACHED = "no pod is evicted: none of the job's members has connected to this supervisor"
_CUT_OFF = "no pod is evicted: fewer than half of the members of all jobs are connected to this supervisor"


@dataclass(frozen=True, slots=True)
class ClusterContext:
    """What all jobs under one leader share."""

    server: ApiServer
    events: EventRecorder
    directory: Path  # for the statuses and incidents of all jobs, on the supervisor's own disk
    epoch: int  # of the leader
    secret: bytes  # from which the secret of each job is derived
    lag: Callable[[], tuple[float, float]]
    delete: Callable[[str, PodMember], None]  # of a namespace
    is_cut_off: Callable[[], bool] = lambda: False  # most members of all jobs are not connected


@dataclass(frozen=True, slots=True)
class RequestedDrill:
    """A drill that a user has requested in the resource. A higher number is a newer request."""

    number: int
    what: str
    rank: int


class PodServer(MemberServer):
    """The connections of one job's members; each order carries the job's secret.

    Members need time to find a new supervisor: their silence counts only after `COME_S`.
    """

    def __init__(self, changed: Callable[[], None], secret: str) -> None:
        super().__init__(time.monotonic_ns, changed)
        self._secret = secret
        self._open_ns = time.monotonic_ns() + int(COME_S * 1e9)

    def connection(self, member: str) -> MemberConnection:
        is_new = member not in self.connections
        line = super().connection(member)
        if is_new:
            line.heard_ns = max(line.heard_ns, self._open_ns)
        return line

    def order(self, member: str, order: MemberOrder) -> None:
        super().order(member, replace(order, secret=self._secret))

    def reports(self) -> Iterable[MemberReport]:
        """Return the newest report of each connected member."""
        return [
            each.report for each in self.connections.values() if each.connected and each.report is not None
        ]


class SupervisedJob:
    """Supervises one job until `close`. `backend` has its pods."""

    def __init__(self, context: ClusterContext, group: PodGroup) -> None:
        self.key: JobKey = group.key
        self.group = group
        self.was_seen = False  # whether the resource has existed: if it is missing then, it was deleted
        self.backend = PodBackend(
            self._delete,
            self._dismiss,
            self._stop_requested,
            time.monotonic,
            responds=self._responds,
            blocked=self._evictions_blocked,
        )
        self.job: Job | None = None
        self._context = context
        self._resource: SupervisionResource | None = None
        self._server = PodServer(self._wake, job_secret(context.secret, group.key))
        self._run_dir = RunDir(context.directory / _folder(group.key))
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: frozenset[str] = frozenset()  # members of the run that has ended
        self._spec: Mapping[str, Any] = {}
        self._records: SupervisionRecords | None = None  # of the present run
        self._summary_due = asyncio.Event()  # the phase has changed since the last summary
        self._blocked = ""  # why no pod may be evicted, as last reported
        self._drilled = -1  # the number of the newest drill that this process has begun

    # -- what the registry reads and sets

    def start(self) -> None:
        """Begin to supervise in the background. Each line that this logs names the job."""
        token = logs.CONTEXT.set({"job": f"{self.key.namespace}/{self.key.name}"})
        self._spawn(self._supervise(), "supervise")
        logs.CONTEXT.reset(token)

    def update(self, group: PodGroup) -> None:
        """Set the present pods and settings. A changed policy applies from the next run on."""
        self.group = group
        self.update_pods(group.pods)

    def update_pods(self, pods: Iterable[PodMember]) -> None:
        """Set the present pods."""
        if self.backend.update(pods):
            self._wake()
        present = {pod.member for pod in self.backend.pods.values()}
        if self.job is not None:  # a lost member is not needed any more
            present |= {*self.job.memory.placement, *self.job.existed} - {*self.job.memory.lost}
        self._server.keep(present)

    def update_spec(self, spec: object) -> None:
        """Carry out what users have requested in the resource's spec."""
        self.was_seen = True
        self._spec = spec if isinstance(spec, Mapping) else {}
        stop = self._spec.get("stop")
        if stop in ("graceful", "now") and self.backend.asked != stop:
            self.backend.asked = "now" if stop == "now" else "graceful"
            self._wake()
        self._drill(self._spec.get("drill"))

    @property
    def reach(self) -> Reach:
        """How many members of the job are connected."""
        running = [pod.member for pod in self.backend.pods.values() if pod.is_running and not pod.is_leaving]
        lines = (self._server.connections.get(member) for member in running)
        return Reach(len(running), sum(line is not None and line.connected for line in lines))

    async def close(self) -> None:
        """End all work on the job without changing it. Its pods continue to train.

        The members' connections end at their next report, so that they connect to the next supervisor.
        """
        await event_loop.end(self._tasks)
        self.backend.update(())  # only now: a running job would regard this as the loss of all members

    async def serve(self, request: web.Request, uid: str) -> web.StreamResponse:
        """Serve the connection of the pod `uid` under the name of its member."""
        limit_bytes = largest_report(self.group.nproc)
        return await self._server.serve(request, lambda: self.backend.member_of(uid), limit_bytes)

    # -- the run

    async def _supervise(self) -> None:
        """Supervise one run after another, until cancelled or deposed."""
        fresh = False
        while True:
            try:
                found = await self._take_over()
            except (ApiError, OSError) as error:
                log.warning("job not taken over", extra={"error": str(error)})
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                await self._run(found, fresh)
            except Deposed as error:
                log.warning("another supervisor leads this job", extra={"why": str(error)})
                return
            except Exception:  # the other jobs must survive this one's failure; its members continue to train
                log.exception("job failed")
                await asyncio.sleep(AGAIN_S)
                fresh = False
                continue
            fresh = await self._next_run()

    async def _take_over(self) -> Takeover:
        group = self.group
        self._resource = await supervision.ensure(
            self._context.server, group.key, group.members, group.nproc, group.settings
        )
        found = await self._resource.take_over(self._context.epoch)
        self._restore_files(found)
        return found

    def _restore_files(self, found: Takeover) -> None:
        """Write the predecessor's status and incidents into the local directory, where the run reads them."""
        shutil.rmtree(self._run_dir.path, ignore_errors=True)
        (self._run_dir.path / "incidents").mkdir(parents=True)
        if found.view is not None:
            self._run_dir.write_status(found.view)
        for incident in found.recent:
            if _INCIDENT.fullmatch(str(incident.get("id"))):
                self._run_dir.write_incident(incident)

    async def _run(self, found: Takeover, fresh: bool) -> None:
        """Supervise one run to its end. Raises `Deposed`."""
        assert self._resource is not None
        records = SupervisionRecords(
            self._resource, found, lambda changed: ReportedStorage(self._server.reports, changed)
        )
        self._records = records
        publisher = StatusPublisher(self._run_dir, self._context.lag, self.group.policy, records.lead)
        self.backend.ended = None
        is_new = fresh or found.state is None
        job = self.job = Job(
            self.group.policy,
            publisher,
            self.backend,
            self._server,
            records,
            is_new,
            time.monotonic_ns(),
        )
        if is_new:
            await self._announce(job, records)
        self._event("Supervised", f"supervised with {job.policy.members} members of {job.policy.nproc} ranks")
        await event_loop.until_one_ends(
            job.run(), job.checkpoints.run(), self._publish(job), self._summarize(job, records)
        )
        await self._write_summary(job, records)
        self._end_members(job)

    def _end_members(self, job: Job) -> None:
        """Order all members of the run to end, including those that connect later.

        Pods that appeared after its last decision do not belong to it, but to the owner's next attempt.
        """
        ended = self.backend.ended
        if ended is not None:
            self._event("Finished", f"{ended.why} (exit code {ended.exit_code})", bad=ended.exit_code != 0)
        self._over = frozenset({*job.memory.placement, *job.memory.lost, *job.existed})
        for member in self._over:
            self._server.order(
                member,
                replace(orders.order_for(job.memory, member, job.policy, None), epoch=job.lead.epoch),
            )

    async def _next_run(self) -> bool:
        """Wait for pods that were not part of the run that has ended.

        After a failure, they are the owner's next attempt: return True, for a new run. After a success, they
        are finished containers that were restarted: order them to end as well.
        """
        job = self.job
        assert job is not None
        while True:
            await asyncio.sleep(POLL_S)
            new = set(self.backend.members) - self._over
            if not new:
                continue
            if job.memory.exit_code:
                return True
            self._over |= new
            for member in new:
                order = orders.order_for(job.memory, member, job.policy, None)
                self._server.order(member, replace(order, epoch=job.lead.epoch))

    # -- publishing

    async def _publish(self, job: Job) -> None:
        """Publish the status; have the summary written at once when the phase changes."""
        shown = (job.memory.phase, job.memory.settled)
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(job.members_changed.wait(), seconds_to_next_tick(STATUS_S))
            job.members_changed.clear()
            job.publish()
            if shown != (job.memory.phase, job.memory.settled):
                shown = (job.memory.phase, job.memory.settled)
                self._summary_due.set()
            await asyncio.sleep(SPACING_S)

    async def _summarize(self, job: Job, records: SupervisionRecords) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._summary_due.wait(), SUMMARY_S)
            self._summary_due.clear()
            await self._write_summary(job, records)

    async def _announce(self, job: Job, records: SupervisionRecords) -> None:
        """Write that a new run forms, in place of the end of the previous one. Raises `Deposed`."""
        try:
            await records.write(supervision.announcement(job.memory))
        except (ApiError, OSError) as error:
            log.info("new run not announced", extra={"error": str(error)})

    async def _write_summary(self, job: Job, records: SupervisionRecords) -> None:
        """Write the summary for users into the resource. A failure is only logged. Raises `Deposed`."""
        publisher = job.publisher
        try:
            incidents = await event_loop.result_of(publisher.files.submit(self._run_dir.incidents), READ_S)
            await records.write(supervision.summary(publisher.published, incidents))
        except Deposed:
            records.lead.depose()
            raise
        except (ApiError, OSError) as error:
            log.info("summary not written", extra={"error": str(error)})

    def _event(self, reason: str, message: str, *, bad: bool = False) -> None:
        key = self.key
        resource = self._resource
        name = resource.name if resource is not None else key.name
        reference = ObjectReference(
            supervision.SUPERVISIONS.api_version, supervision.KIND, key.namespace, name, ""
        )
        self._context.events.record(reference, reason, message, "Warning" if bad else "Normal")

    # -- requests

    def _drill(self, wanted: object) -> None:
        """Begin a drill that a user has requested in the resource, once for each number."""
        asked = _read_drill(wanted)
        if asked is None or asked.number <= self._drilled or self._records is None:
            return  # without records, the job is not taken over yet: the registry calls this again soon
        self._drilled = asked.number
        self._spawn(self._carry_out(asked, self._records), "drill")

    async def _carry_out(self, asked: RequestedDrill, records: SupervisionRecords) -> None:
        """Carry out a drill, and write the result into the resource.

        The number is written first, so that no other process repeats the fault if this one dies.
        """
        try:
            if not await self._claim(asked, records):
                return
            result = await self._inject(asked)
            await self._write_drill(records, asked, result)
        except Deposed:
            records.lead.depose()
        except (ApiError, OSError) as error:
            log.warning("drill not recorded", extra={"error": str(error)})

    async def _claim(self, asked: RequestedDrill, records: SupervisionRecords) -> bool:
        """Write the number of a drill; return False if it was written before. Raises `Deposed`."""
        assert self._resource is not None  # because there are records
        try:
            found = await self._context.server.get(
                supervision.SUPERVISIONS, self._resource.name, self._resource.namespace
            )
            known = (found.get("status") or {}).get("drilled")
            if type(known) is int and known >= asked.number:
                return False
            await self._write_drill(records, asked, "")
        except (ApiError, OSError):
            self._drilled = asked.number - 1  # the next round of the registry starts the drill again
            raise
        return True

    async def _write_drill(self, records: SupervisionRecords, asked: RequestedDrill, result: str) -> None:
        values = {"drilled": asked.number, "drillResult": result[: supervision.MAX_INCIDENT_BYTES]}
        await records.write(values)

    async def _inject(self, asked: RequestedDrill) -> str:
        """Cause the fault; return `supervision.DRILL_DONE`, or why it was not caused."""
        job = self.job
        assert job is not None  # because there are records
        if asked.what not in DRILLS:
            return f"unknown drill {asked.what!r}: expected {', '.join(DRILLS)}"
        if asked.what == "supervisor":
            return "the supervisor of a cluster serves all of its jobs: delete its pod instead"
        try:
            pending = job.inject(asked.what, asked.rank)
        except ValueError as error:
            return str(error)
        if asked.what == "member":
            member = job.memory.placement[asked.rank // job.memory.nproc]
            for pod in self.backend.pods.values():
                if pod.member == member:
                    self._delete(pod)
        refused = "" if pending is None else await job.drills.refusal(pending)
        return f"{refused}: the drill is withdrawn" if refused else supervision.DRILL_DONE

    def _stop_requested(self, how: StopRequest) -> None:
        if self._resource is not None:
            self._spawn(self._record_stop(self._resource, how), "stop")

    async def _record_stop(self, resource: SupervisionResource, how: StopRequest) -> None:
        try:
            await resource.request_stop("now" if how == "now" else "graceful")
        except (ApiError, OSError) as error:
            log.warning("request to stop not recorded", extra={"error": str(error)})

    def _delete(self, pod: PodMember) -> None:
        self._context.delete(self.key.namespace, pod)

    def _responds(self, member: str) -> bool:
        line = self._server.connection(member)
        report = line.report
        return (
            line.connected
            and report is not None
            and report.launcher is not None
            and not report.launcher_silent
        )

    def _evictions_blocked(self) -> bool:
        """Return whether this supervisor, and not a member, may be what is unreachable. Report it once."""
        why = "" if self._server.has_heard else _NOT_REACHED
        why = why or (_CUT_OFF if self._context.is_cut_off() else "")
        if why and why != self._blocked:
            log.warning("evictions blocked", extra={"why": why})
            self._event("EvictionBlocked", why, bad=True)
        self._blocked = why
        return bool(why)

    def _dismiss(self, member: str) -> None:
        if self.job is not None:
            memory, epoch = self.job.memory, self.job.lead.epoch
            order = MemberOrder("stop", memory.generation, epoch=epoch, exit_code=DISMISSED)
            self._server.order(member, order)

    def _wake(self) -> None:
        if self.job is not None:
            self.job.wake.set()

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"{name} {self.key.name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task failed", extra={"task": task.get_name()}, exc_info=task.exception())


def _read_drill(wanted: object) -> RequestedDrill | None:
    """Return the drill in a Supervision's spec; None if there is none or it is invalid."""
    if not isinstance(wanted, Mapping):
        return None
    number, what, rank = wanted.get("number"), wanted.get("what"), wanted.get("rank", 0)
    if type(number) is not int or type(rank) is not int or not isinstance(what, str):
        return None
    return RequestedDrill(number, what, rank)


def job_secret(secret: bytes, key: JobKey) -> str:
    """Return the secret of a job: the same for each leader, and different for every job."""
    name = json.dumps([key.namespace, key.name, key.uid]).encode()
    return hmac.new(secret, b"holdfast job " + name, hashlib.sha256).hexdigest()


def _folder(key: JobKey) -> str:
    return hashlib.sha256(json.dumps([key.namespace, key.name, key.uid]).encode()).hexdigest()[:32]
