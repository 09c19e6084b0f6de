"""Group the pods of a cluster into jobs, and run one `SupervisedJob` for each job.

The registry is level-triggered. After each change to pods or Supervisions, `reconcile` reads the mirrors,
assigns pods to jobs by their owners, and starts, updates or ends jobs to match.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from supervisor.admission import pod_layout
from supervisor.cluster.adoption import job_membership, owner_size, pod_facts, uninjected
from supervisor.cluster.adoption.job_membership import JobKey, NotAdopted, OwnerChain, PlaceInJob
from supervisor.cluster.pod_groups import (
    NOT_SUPERVISED,
    FormedGroup,
    OwnedPod,
    Refusal,
    form_group,
    has_ended,
    ongoing_group,
    with_standbys,
)
from supervisor.cluster.pods import PodGroup, member_name
from supervisor.cluster.reach import OutOfReach, out_of_reach
from supervisor.cluster.standbys.cluster_room import IdleStandby
from supervisor.cluster.supervised_job import SupervisedJob
from supervisor.cluster.supervision import contents
from supervisor.cluster.supervision.contents import SUPERVISIONS, OngoingRun
from supervisor.kubernetes.client import PODS, ApiServer, KubernetesObject
from supervisor.kubernetes.errors import ApiError
from supervisor.kubernetes.events import EventRecorder, ObjectReference, api_time
from supervisor.kubernetes.object_cache import ObjectCache
from supervisor.kubernetes.watch import Mirror, ObjectName

log = logging.getLogger(__name__)

MEMBERS = f"{pod_layout.MEMBER_LABEL}={pod_layout.IS_MEMBER}"  # the label selector of members
RETRY_S = 5.0  # the time between two rounds if nothing changes
REACH_S = 1.0  # how long a count of the connected members is reused; each job asks several times a second
GATHER_S = 0.05  # how long to collect changes, because a job's pods are created one after another
REMIND_S = 3000.0  # the time before an unchanged event is repeated; the API server keeps events for an hour
MAX_NOTICES = 20_000
# The maximum number of jobs that are supervised at the same time in one namespace, not counting jobs that
# have ended. A job takes 120 KiB and a task, and a supervisor is designed for 250 of them.
MAX_JOBS = 1_000
SLICE_S = 0.002  # how long a round considers pods or jobs before other work may run
SCAN_S = 60.0  # the time between two searches for pods that are not injected

_T = TypeVar("_T")


class _SortedPod(NamedTuple):
    """A pod of the mirror, its owners and its job. Valid until one of these objects is replaced."""

    pod: KubernetesObject
    owners: OwnerChain
    key: JobKey | NotAdopted


class _Notices:
    """Records events about pods. An unchanged reason is recorded once, and again after `REMIND_S`."""

    def __init__(self, events: EventRecorder, now_s: Callable[[], float]) -> None:
        self._events, self._now_s = events, now_s
        # the hash of each reason, which can be long, and when it was recorded
        self._given: dict[tuple[str, str], tuple[int, float]] = {}

    def record(self, pod: KubernetesObject, reason: str, why: str) -> None:
        key = (pod["metadata"]["uid"], reason)
        before, since_s = self._given.pop(key, (None, 0.0))
        if before != hash(why) or self._now_s() - since_s >= REMIND_S:
            since_s = self._now_s()
            self._events.record(ObjectReference.of(pod), reason, why, "Warning")
        self._given[key] = (hash(why), since_s)
        if len(self._given) > MAX_NOTICES:
            del self._given[next(iter(self._given))]


class ClusterJobs:
    """Supervises the jobs of a cluster for the term of one leader."""

    def __init__(
        self,
        server: ApiServer,
        pods: Mirror,
        supervisions: Mirror,
        events: EventRecorder,
        make: Callable[[PodGroup], SupervisedJob],
        nodes: Mapping[ObjectName, KubernetesObject] = MappingProxyType({}),
    ) -> None:
        """`make` returns a job that has not been started. `nodes` are the current Node objects, by name.

        Set `changed` after `nodes` changes. `nodes` may lack nodes, and the parts of nodes that `kept_node`
        does not keep.
        """
        self._nodes = nodes
        self._heeded: frozenset[str] = frozenset()  # nodes whose agent's verdict moves members
        self.jobs: dict[JobKey, SupervisedJob] = {}
        self._server, self._pods, self._supervisions = server, pods, supervisions
        self._events, self._make = events, make
        self.changed = asyncio.Event()
        self.formed = asyncio.Event()  # set when the runs of earlier leaders have been found and adopted
        now_s = asyncio.get_running_loop().time
        self._owners = ObjectCache(
            server, now_s, lambda: self.changed.set(), owner_size.kept, pod_facts.characters
        )
        self._notices = _Notices(events, now_s)
        self.leads: Callable[[], bool] = lambda: True  # True if this process is sure to hold the Lease
        self._by_uid: dict[str, SupervisedJob] = {}
        # The groups of runs that another supervisor began, until a `SupervisedJob` takes over each of them.
        self._ongoing: dict[JobKey, PodGroup] = {}
        # Results of the last round, which are reused because reading 2,000 pods again takes a fifth of a
        # second.
        self._sorted: dict[ObjectName, _SortedPod] = {}
        self._formed: dict[JobKey, FormedGroup] = {}
        self._at_rest: set[JobKey] = set()  # ended jobs whose ended pods still exist
        self._out_of_reach = (-math.inf, OutOfReach())  # when connections were last counted, and the result

    def job_of(self, pod_uid: str) -> SupervisedJob | None:
        """Return the job of a pod; None if the pod has no job, or none yet."""
        return self._by_uid.get(pod_uid)

    def is_out_of_reach(self, namespace: str) -> bool:
        """Return True if this supervisor may not reach the pods of a namespace; see `out_of_reach`."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._out_of_reach[0] >= REACH_S:
            reaches = ((key.namespace, job.reach) for key, job in self.jobs.items())
            self._out_of_reach = now_s, out_of_reach(reaches)
        return self._out_of_reach[1].includes(namespace)

    async def run(self) -> None:
        """Reconcile after every change, and every `RETRY_S`. When cancelled, end the tasks of all jobs."""
        try:
            await asyncio.gather(self._pods.synced.wait(), self._supervisions.synced.wait())
            await self._find_ongoing()
            while True:
                self.changed.clear()
                self._owners.forget_unused()
                try:
                    await self.reconcile()
                    self.formed.set()
                except (ApiError, OSError) as error:  # running jobs continue, and the next round tries again
                    log.warning("jobs not reconciled", extra={"error": str(error)})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), RETRY_S)
                await asyncio.sleep(GATHER_S)
        finally:
            await asyncio.gather(self._owners.close(), *(each.close() for each in self.jobs.values()))

    def place_of(self, pod: KubernetesObject) -> PlaceInJob | NotAdopted:
        """Return the place of a pod in its job, even if it is not injected. Starts to read unknown owners."""
        return job_membership.place_of(pod, job_membership.top_owner(pod, self._owners.find))

    def notice(self, pod: KubernetesObject, reason: str, why: str) -> None:
        """Record an event about a pod, once for each reason and text."""
        self._notices.record(pod, reason, why)

    async def find_unsupervised(self) -> None:
        """Record an event about each pod that requests Holdfast but was not injected. Never returns."""

        def examine(pod: KubernetesObject) -> KubernetesObject:
            if found := uninjected.uninjected(pod, recent):
                self._notices.record(found.pod, "NotInjected", found.why)
            return {}  # a user may have thousands of such pods

        while True:
            await asyncio.sleep(SCAN_S)
            recent = api_time(datetime.now(timezone.utc) - timedelta(seconds=REMIND_S))
            try:
                await self._server.list(PODS, labels=f"!{pod_layout.MEMBER_LABEL}", prune=examine)
            except (ApiError, OSError) as error:
                log.warning("pods not listed", extra={"error": str(error)})

    async def reconcile(self) -> None:
        """Bring the jobs up to date with the mirrors, and with what is known about owners.

        A round over 2,000 pods takes 30 to 120 ms. Decisions about jobs are made between its slices.
        """
        groups = await self._groups()
        self._at_rest &= groups.keys()
        running = Counter(key.namespace for key in self.jobs)
        async for group in _in_slices(groups.values()):
            job = self.jobs.get(group.key)
            if job is None and group.key in self._at_rest and all(pod.has_ended for pod in group.pods):
                continue
            if job is None:
                namespace = group.key.namespace
                if running[namespace] >= MAX_JOBS:
                    self._refuse_job(group)
                    continue
                running[namespace] += 1
                self._at_rest.discard(group.key)
                job = self.jobs[group.key] = self._make(group)
                job.start()
                job.update(group)
            elif job.group is not group:
                job.update(group)
        async for key, job in _in_slices(tuple(self.jobs.items())):
            job.note_departures(self._nodes, self._heeded)
            found = self._supervision(key)
            if key not in groups:  # the job's last pod is gone
                job.update_pods(())
            if job.is_unneeded:
                self._at_rest.add(key)
                await self.jobs.pop(key).close()
            elif self._is_over(job, found):
                if job.has_ended:  # another supervisor had taken over the run
                    self._ongoing[key] = job.group
                if found is None:  # pods that have ended must not recreate the deleted resource
                    self._at_rest.add(key)
                await self.jobs.pop(key).close()
                self.changed.set()  # the remaining pods become a new job
            elif found is not None:
                job.update_spec(found.get("spec"), found["metadata"].get("uid"))
        self._by_uid = {uid: job for job in self.jobs.values() for uid in job.backend.pods}
        self._ongoing = {key: group for key, group in self._ongoing.items() if key not in self.jobs}

    def leave(self, node: str, why: str) -> None:
        """Move all members that are now on a node to standbys, and then evict their pods. Idempotent.

        `why` is a clause for users, such as "node n1 is quarantined: Xid 79".
        """
        for job in self.jobs.values():
            job.leave(node, why)

    def members_on(self, node: str) -> int:
        """Return the number of supervised jobs' pods on a node, without pods that have ended."""
        return sum(job.members_on(node) for job in self.jobs.values())

    def heed_verdicts(self, nodes: frozenset[str]) -> None:
        """Move members to standbys because of node agents' bad verdicts, but only members on these nodes."""
        if nodes != self._heeded:
            self._heeded = nodes
            self.changed.set()

    def idle_standbys(self) -> list[IdleStandby]:
        """Return the standbys of all jobs that may yield to another pod of the cluster now."""
        return [each for job in self.jobs.values() for each in job.idle_standbys()]

    def _refuse_job(self, group: PodGroup) -> None:
        """Record an event about the first pod of a job that is not supervised."""
        why = f"the namespace has {MAX_JOBS} supervised jobs, which is the limit: wait until one has ended"
        for pod in group.pods[:1]:
            found = self._pods.objects.get(ObjectName(group.key.namespace, pod.name))
            if found is not None:
                self._record(Refusal(found, NOT_SUPERVISED, why))

    def _is_over(self, job: SupervisedJob, found: KubernetesObject | None) -> bool:
        """Return True if this supervisor has nothing left to do for the job, which can then be closed.

        If another supervisor has taken over the job, this is True only if this process is sure to lead.
        """
        if job.has_ended and self.leads():
            return True
        if found is not None:
            return job.was_replaced(found["metadata"].get("uid"))
        if job.was_seen:  # the job's resource was deleted, together with its owner or by a user
            return not job.backend.is_leaving
        return not job.backend.pods  # the job's resource was never created, or was soon deleted again

    def _supervision(self, key: JobKey) -> KubernetesObject | None:
        """Return the resource of a job, which can have either of two names; None if there is none."""
        places = (ObjectName(key.namespace, name) for name in contents.names(key))
        found = (self._supervisions.objects.get(place) for place in places)
        return next((each for each in found if each and contents.belongs_to(each, key)), None)

    async def _groups(self) -> dict[JobKey, PodGroup]:
        """Return the groups of pods, and record events about pods that are not members.

        A pod remains with its job until it is gone, even if it or its owners change.
        """
        by_key: dict[JobKey, list[OwnedPod]] = {}
        standbys: dict[str, list[KubernetesObject]] = {}  # by the uid of the Supervision that owns them
        ongoing = {pod.uid: key for key, group in self._ongoing.items() for pod in group.pods}
        pods = tuple(self._pods.objects.items())
        self._sorted = {name: self._sort(name, pod) async for name, pod in _in_slices(pods)}
        for pod, owners, key in self._sorted.values():
            uid = pod["metadata"]["uid"]
            if owner := contents.supervision_of(pod):
                standbys.setdefault(owner, []).append(pod)
                continue
            job = self._by_uid.get(uid)
            known = job.key if job is not None else ongoing.get(uid)
            if known is not None:
                by_key.setdefault(known, []).append(OwnedPod(pod, owners, _departure(key, known)))
            elif not isinstance(key, NotAdopted):
                by_key.setdefault(key, []).append(OwnedPod(pod, owners, ""))
            elif owners.unread is None or self._owners.refusal(owners.unread):  # the owner is not being read
                self._record(Refusal(pod, NOT_SUPERVISED, key.why))
        by_job = self._by_job(standbys, by_key)
        for key in by_job:  # all other pods of the job may be gone
            by_key.setdefault(key, [])
        self._formed = {
            key: self._form(key, found, by_job.get(key, ()))
            async for key, found in _in_slices(by_key.items())
        }
        for formed in self._formed.values():
            for each in formed.refusals:
                self._record(each)
        return {key: each.group for key, each in self._formed.items() if each.group is not None}

    def _by_job(
        self, standbys: Mapping[str, Sequence[KubernetesObject]], known: Iterable[JobKey]
    ) -> dict[JobKey, Sequence[KubernetesObject]]:
        """Return the standbys of each job, given the standbys of each Supervision.

        A standby of another Supervision is about to be deleted with its owner.
        """
        if not standbys:
            return {}
        keys = dict.fromkeys((*self.jobs, *self._ongoing, *known))
        owners = ((key, str(_uid(self._supervision(key)))) for key in keys)
        return {key: standbys[uid] for key, uid in owners if uid in standbys}

    def _record(self, refusal: Refusal) -> None:
        """Record an event, unless its pod has ended and no longer needs to be changed."""
        if not has_ended(refusal.pod):
            self._notices.record(*refusal)

    def _sort(self, name: ObjectName, pod: KubernetesObject) -> _SortedPod:
        last = self._sorted.get(name)
        if last is not None and last.pod is pod and last.owners.unread is None and not last.owners.why:
            owners = last.owners.owners
            if all(self._owners.find(each.reference) is each.content for each in owners):
                return last
        owners_now = job_membership.top_owner(pod, self._owners.find)
        return _SortedPod(pod, owners_now, job_membership.job_key(pod, owners_now))

    def _form(
        self, key: JobKey, found: Sequence[OwnedPod], standbys: Sequence[KubernetesObject]
    ) -> FormedGroup:
        job, last = self.jobs.get(key), self._formed.get(key)
        before = job.group if job is not None else self._ongoing.get(key)
        is_known = last is not None and last.group is before is not None
        is_at_rest = job is None and key in self._at_rest
        is_unchanged = last is not None and _are_same(last.found, found, last.standbys, standbys)
        if last is not None and (is_known or is_at_rest) and is_unchanged:
            return last
        group, refusals = form_group(key, found, before)
        return FormedGroup(found, standbys, with_standbys(group, standbys), refusals)

    async def _find_ongoing(self) -> None:
        """Find the runs that earlier leaders have begun, and their pods.

        These pods remain with their job as under the earlier leader, even if one of them has become invalid
        or if the owner cannot be read at present. No job can be taken over before the API server answers, so
        this waits until it does.
        """
        runs: list[OngoingRun] = []

        def examine(found: KubernetesObject) -> KubernetesObject:
            run = contents.ongoing_run(found)
            if run is not None and run.uid == _uid(self._supervision(run.key)):
                runs.append(run)
            return {}  # a list of whole Supervisions would need a lot of memory

        while True:
            runs.clear()
            try:
                await self._server.list(SUPERVISIONS, prune=examine)
                break
            except (ApiError, OSError) as error:
                log.warning("runs of earlier leaders not found", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
        pods: dict[tuple[str, str], KubernetesObject] = {}
        for name, pod in self._pods.objects.items():
            pods[name.namespace, member_name(name.name, pod["metadata"]["uid"], 0)] = pod
        groups = (ongoing_group(run, pods) for run in runs)
        self._ongoing = {group.key: group for group in groups if group.pods}


async def _in_slices(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield `items`, letting the event loop do other work after every `SLICE_S`."""
    until_s = time.perf_counter() + SLICE_S
    for each in items:
        yield each
        if time.perf_counter() >= until_s:
            await asyncio.sleep(0)
            until_s = time.perf_counter() + SLICE_S


def _are_same(
    one: Sequence[OwnedPod],
    other: Sequence[OwnedPod],
    standbys: Sequence[KubernetesObject],
    others: Sequence[KubernetesObject],
) -> bool:
    """Return True if both pairs contain the identical pod and owner objects."""
    return (
        len(one) == len(other)
        and len(standbys) == len(others)
        and all(
            a.pod is b.pod and a.owners is b.owners and a.why == b.why
            for a, b in zip(one, other, strict=True)
        )
        and all(a is b for a, b in zip(standbys, others, strict=True))
    )


def _departure(key: JobKey | NotAdopted, job: JobKey) -> str:
    """Return why a pod no longer seems to belong to its job; "" if it still does."""
    if isinstance(key, NotAdopted):
        return key.why
    return "" if key == job else f"the pod now belongs to another job, {key.name}"


def _uid(found: KubernetesObject | None) -> object:
    return found["metadata"].get("uid") if found is not None else None
