"""All jobs of a cluster: which pods belong together, and one `SupervisedJob` for each group.

The registry is level-triggered. Whenever pods or Supervisions have changed, `reconcile` reads the mirrors,
sorts the pods into jobs by their owners, and starts, updates or ends jobs until they agree with what it read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from supervisor.admission import pod_layout
from supervisor.admission import settings as pod_settings
from supervisor.cluster import job_membership, pod_facts, supervision
from supervisor.cluster.job_membership import Adopted, JobKey, NotAdopted, OwnerReference
from supervisor.cluster.pods import PodGroup, PodMember, read_pod
from supervisor.cluster.supervised_job import SupervisedJob
from supervisor.cluster.untrusted_json import UnfitObject
from supervisor.kubernetes.client import ApiServer, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import ApiError, ServerUnreachable
from supervisor.kubernetes.events import EventRecorder, ObjectReference
from supervisor.kubernetes.watch import Mirror, ObjectName

log = logging.getLogger(__name__)

PODS = ResourceKind("", "v1", "pods")
MEMBERS = f"{pod_layout.MEMBER_LABEL}={pod_layout.IS_MEMBER}"  # a selector
OWNER_S = 30.0  # an owner is read again after this time, because its number of pods may change
RETRY_S = 5.0  # until a failed request is retried, and between two rounds without a change
GATHER_S = 0.05  # to collect changes, because a job's pods are created one after another
MAX_OWNERS = 10_000
# The annotation's default. The kubelet takes up to 10 s to restart a sidecar that has ended twice.
MEMBER_TIMEOUT_S = 30.0
SCAN_S = 60.0  # between two searches for pods that the webhook has missed
_MISSED = (
    f"the pod has the annotation {pod_layout.INJECT} but was created without Holdfast, because the webhook"
    " did not respond: it trains unsupervised until it is recreated"
)
MAX_DEPTH = 8  # owners of owners

MAX_LAST = 256  # owners beyond those in use that are remembered
AT_A_TIME = 20  # pods that are sorted before the event loop does other work: about 10 ms


class OwnerCache:
    """The owners of pods, each read at most `OWNER_S` ago."""

    def __init__(self, server: ApiServer, now_s: Callable[[], float]) -> None:
        self._server, self._now_s = server, now_s
        self._known: dict[OwnerReference, tuple[float, KubernetesObject | None]] = {}
        self._failed: dict[OwnerReference, tuple[float, ServerUnreachable]] = {}  # the last attempts
        self._last: dict[OwnerReference, KubernetesObject] = {}  # as last read, however long ago

    def is_current(self, chain: job_membership.OwnerChain) -> bool:
        """True if `chain` is complete, and still what `chain` would return without reading anything."""
        if chain.unread is not None or chain.why:
            return False
        return all(self._find(each.reference) is each.content for each in chain.owners)

    async def chain(self, pod: KubernetesObject) -> job_membership.OwnerChain:
        """Return the owners of `pod`, and read those that are not cached.

        Raises `ServerUnreachable`. It is then raised for `RETRY_S` without another request.
        """
        for _ in range(MAX_DEPTH):
            found = job_membership.top_owner(pod, self._find)
            if found.unread is None or self._is_known(found.unread):
                return found
            await self._read(found.unread)
        return found

    def _find(self, reference: OwnerReference) -> object:
        known = self._known.get(reference)
        return known[1] if known is not None else None

    def _is_known(self, reference: OwnerReference) -> bool:
        known = self._known.get(reference)
        return known is not None and self._now_s() - known[0] < OWNER_S

    async def _read(self, reference: OwnerReference) -> None:
        group, _, version = reference.api_version.rpartition("/")
        kind = ResourceKind(group, version, f"{reference.kind.lower()}s")  # for all kinds in the table
        found: KubernetesObject | None = None
        if reference in self._failed:
            raise self._failed[reference][1]
        try:
            found = await self._server.get(kind, reference.name, reference.namespace)
        except ServerUnreachable as error:
            self._failed[reference] = (self._now_s(), error)
            raise
        except ApiError as error:
            log.warning("owner not read", extra={"owner": str(reference), "error": str(error)})
        if len(self._known) >= MAX_OWNERS:
            self._known.clear()
            self._last.clear()
        if found is not None:
            last = self._last.get(reference)
            if last is not None and _version(last) == _version(found):
                found = last  # the same object, so that what was derived from it remains valid
            self._last[reference] = found
        self._known[reference] = (self._now_s(), found)

    def forget_old(self) -> None:
        """Forget owners that were read too long ago, so that they are read again."""
        now_s = self._now_s()
        self._known = {key: each for key, each in self._known.items() if now_s - each[0] < OWNER_S}
        self._failed = {key: each for key, each in self._failed.items() if now_s - each[0] < RETRY_S}
        if len(self._last) > 2 * len(self._known) + MAX_LAST:  # owners of jobs that are gone
            self._last = {key: each for key, each in self._last.items() if key in self._known}


@dataclass(frozen=True, slots=True, eq=False)
class _SortedPod:
    """A pod of a mirror, its owners, and its job. Valid as long as these are the present objects."""

    pod: KubernetesObject
    chain: job_membership.OwnerChain
    key: JobKey


class ClusterJobs:
    """The jobs of a cluster, for the term of one leader."""

    def __init__(
        self,
        server: ApiServer,
        pods: Mirror,
        supervisions: Mirror,
        events: EventRecorder,
        make: Callable[[PodGroup], SupervisedJob],
    ) -> None:
        """`make` returns a job that has not been started."""
        self.jobs: dict[JobKey, SupervisedJob] = {}
        self._server, self._pods, self._supervisions = server, pods, supervisions
        self._events, self._make = events, make
        self._owners = OwnerCache(server, asyncio.get_running_loop().time)
        self.changed = asyncio.Event()
        self._sorted: dict[ObjectName, _SortedPod] = {}  # of the last round
        self._known_groups: dict[JobKey, tuple[list[_SortedPod], PodGroup]] = {}
        self._by_uid: dict[str, SupervisedJob] = {}

    def job_of(self, pod_uid: str) -> SupervisedJob | None:
        """Return the job of a pod; None if it belongs to no job, or not yet."""
        return self._by_uid.get(pod_uid)

    async def run(self) -> None:
        """Reconcile on every change and every `RETRY_S` until cancelled; then end the tasks of all jobs."""
        try:
            await asyncio.gather(self._pods.synced.wait(), self._supervisions.synced.wait())
            while True:
                self.changed.clear()
                self._owners.forget_old()
                try:
                    await self.reconcile()
                except (ApiError, OSError) as error:  # running jobs continue, and all others are retried
                    log.warning("jobs not reconciled", extra={"error": str(error)})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), RETRY_S)
                await asyncio.sleep(GATHER_S)
        finally:
            await asyncio.gather(*(each.close() for each in self.jobs.values()))

    async def find_unsupervised(self) -> None:
        """Record an event about each pod that requests Holdfast but was not injected. Never returns.

        The webhook was unavailable when such a pod was created.
        """
        while True:
            await asyncio.sleep(SCAN_S)
            try:
                found = await self._server.list(PODS, labels=f"!{pod_layout.MEMBER_LABEL}", prune=_if_missed)
            except (ApiError, OSError) as error:
                log.warning("pods not listed", extra={"error": str(error)})
                continue
            for pod in found.objects:
                if pod:
                    self._events.record(ObjectReference.of(pod), "NotInjected", _MISSED, "Warning")

    async def reconcile(self) -> None:
        """Bring the jobs up to date with the mirrors, except those whose owners cannot be read now."""
        groups, unread = await self._groups()
        for group in groups.values():
            if group.key in unread:
                continue
            job = self.jobs.get(group.key)
            if job is None:
                job = self.jobs[group.key] = self._make(group)
                job.start()
                job.update(group)
            elif job.group is not group:
                job.update(group)
        for key, job in tuple(self.jobs.items()):
            found = self._supervision(key)
            if key not in groups and key not in unread:
                job.update_pods(())
            if found is not None:
                job.update_spec(found.get("spec"))
            elif job.was_seen and not job.backend.is_leaving:  # it was deleted, with its owner or by a user
                await self.jobs.pop(key).close()
        self._by_uid = {uid: job for job in self.jobs.values() for uid in job.backend.pods}

    def _supervision(self, key: JobKey) -> KubernetesObject | None:
        """Return the resource of a job, under its first or its second name; None if there is none."""
        places = (ObjectName(key.namespace, name) for name in supervision.names(key))
        found = (self._supervisions.objects.get(place) for place in places)
        return next((each for each in found if each and supervision.belongs_to(each, key)), None)

    async def _groups(self) -> tuple[dict[JobKey, PodGroup], set[JobKey]]:
        """Return the groups of pods, and the jobs of pods whose owners cannot be read now.

        A single kind may be unreadable, because its API may be served by a component that is down.
        """
        by_key: dict[JobKey, list[_SortedPod]] = {}
        unread: set[JobKey] = set()
        kept: dict[ObjectName, _SortedPod] = {}
        new = 0
        for name, pod in tuple(self._pods.objects.items()):
            each = self._sorted.get(name)
            if each is None or each.pod is not pod or not self._owners.is_current(each.chain):
                new += 1
                if new % AT_A_TIME == 0:
                    await asyncio.sleep(0)
                try:
                    each = await self._sort(pod)
                except ServerUnreachable as error:
                    log.warning("owner not read", extra={"pod": pod["metadata"]["name"], "error": str(error)})
                    known = self._by_uid.get(pod["metadata"]["uid"])
                    unread |= {known.key} if known is not None else set()
                    continue
            if each is not None:
                kept[name] = each
                by_key.setdefault(each.key, []).append(each)
        self._sorted = kept
        groups: dict[JobKey, PodGroup] = {}
        before, self._known_groups = self._known_groups, {}
        for key, found in by_key.items():
            known_pods, group = before.get(key, ([], None))
            if group is None or known_pods != found:
                await asyncio.sleep(0)
                group = self._group(key, found)
            if group is not None:
                groups[group.key] = group
                if len(group.pods) == len(found):  # otherwise the reasons are recorded again each time
                    self._known_groups[key] = (found, group)
        return groups, unread

    async def _sort(self, pod: KubernetesObject) -> _SortedPod | None:
        """Return the pod with its job; None if it has none. Raises `ServerUnreachable`."""
        chain = await self._owners.chain(pod)
        key = job_membership.job_key(pod, chain)
        if isinstance(key, NotAdopted):
            self._refuse(pod, key.why)
            return None
        return _SortedPod(pod, chain, key)

    def _group(self, key: JobKey, found: list[_SortedPod]) -> PodGroup | None:
        pods = [each.pod for each in found]
        said = job_membership.read_group(pods, found[0].chain)
        adopted: list[tuple[Adopted, PodMember]] = []
        for each in found:
            result = job_membership.adopt(each.pod, each.chain, said)
            if isinstance(result, NotAdopted):
                self._refuse(each.pod, result.why)
            else:
                adopted.append((result, read_pod(each.pod, _container(each.pod))))
        if not adopted:
            return None
        first = adopted[0][0]
        annotations = pods[0]["metadata"].get("annotations") or {}
        try:
            settings = pod_settings.parse(annotations)
        except pod_settings.PodSettingsError as error:
            self._refuse(pods[0], str(error))
            return None
        given = {
            name.removeprefix(pod_layout.PREFIX): text
            for name, text in annotations.items()
            if name in pod_settings.ANNOTATIONS
        }
        members = tuple(member for _, member in sorted(adopted, key=lambda item: item[0].order))
        policy = pod_settings.policy(settings, first.members, first.nproc)
        if f"{pod_layout.PREFIX}member-timeout" not in annotations:
            policy = replace(policy, member_timeout_s=MEMBER_TIMEOUT_S)
        if not settings.checkpoints.is_durable:  # each pod would store its checkpoints separately
            policy = replace(policy, checkpoint_every_s=0.0)
        policy = replace(policy, foreign_members=True)  # the owner creates the pods
        return PodGroup(key, first.members, first.nproc, policy, given, members)

    def _refuse(self, pod: KubernetesObject, why: str) -> None:
        self._events.record(ObjectReference.of(pod), "NotSupervised", why, "Warning")


def _if_missed(pod: KubernetesObject) -> KubernetesObject:
    """Return the identity of a pod that requests Holdfast but never reached the webhook; {} for others."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    asks = annotations.get(pod_layout.INJECT) == "true"
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if not asks or ended or pod_layout.NOT_INJECTED in annotations:
        return {}
    identity = {key: metadata.get(key) for key in ("name", "namespace", "uid")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": identity}


def _version(found: KubernetesObject) -> object:
    return found["metadata"].get("resourceVersion", found)  # without one, no other object is the same


def _container(pod: KubernetesObject) -> str:
    """Return the name of the training container that the webhook recorded, or else of the first container."""
    try:
        name = pod_facts.read(pod).injected.get("container")
    except UnfitObject:
        name = None
    containers: list[Any] = pod["spec"]["containers"]
    return name if isinstance(name, str) else str(containers[0]["name"])
