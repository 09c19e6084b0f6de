"""All jobs of a cluster: which pods belong together, and one `SupervisedJob` for each group.

The registry is level-triggered. Whenever pods or Supervisions have changed, `reconcile` reads the mirrors,
sorts the pods into jobs by their owners, and starts, updates or ends jobs until they agree with what it read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from supervisor.admission import pod_layout
from supervisor.admission import settings as pod_settings
from supervisor.cluster import job_membership, pod_facts, supervision
from supervisor.cluster.job_membership import Adopted, JobKey, NotAdopted, OwnerReference
from supervisor.cluster.pods import PodGroup, PodMember, read_pod, too_few_connected
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
AGAIN_S = 5.0  # until a failed request is retried, and between two rounds without a change
REACH_S = (
    1.0  # for which the count of the connected members stays valid: each job asks several times a second
)
GATHER_S = 0.05  # for collecting changes: a job's pods are created one after another
MAX_OWNERS = 10_000
# The default of the annotation: the kubelet takes up to 10 s to restart a sidecar that has ended twice.
MEMBER_TIMEOUT_S = 30.0
SCAN_S = 60.0  # between two searches for pods that the webhook has missed
_MISSED = (
    f"the pod has the annotation {pod_layout.INJECT} but was created without Holdfast, because the webhook"
    " did not answer: it trains unsupervised until it is created again"
)
MAX_DEPTH = 8  # owners of owners

_OwnedPod: TypeAlias = tuple[KubernetesObject, job_membership.OwnerChain]


class OwnerCache:
    """The owners of pods, each read at most `OWNER_S` ago."""

    def __init__(self, server: ApiServer, now_s: Callable[[], float]) -> None:
        self._server, self._now_s = server, now_s
        self._known: dict[OwnerReference, tuple[float, KubernetesObject | None]] = {}
        self._failed: dict[OwnerReference, tuple[float, ServerUnreachable]] = {}  # the last attempts

    async def chain(self, pod: KubernetesObject) -> job_membership.OwnerChain:
        """Return the owners of `pod`, and read those that are not known.

        Raises `ServerUnreachable`. For the next `AGAIN_S`, it is then raised again without a request.
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
        kind = ResourceKind(group, version, f"{reference.kind.lower()}s")  # true for all kinds in the table
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
        self._known[reference] = (self._now_s(), found)

    def forget_old(self) -> None:
        """Forget owners that were read too long ago, so that they are read again."""
        now_s = self._now_s()
        self._known = {key: each for key, each in self._known.items() if now_s - each[0] < OWNER_S}
        self._failed = {key: each for key, each in self._failed.items() if now_s - each[0] < AGAIN_S}


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
        """`make` returns a job that is not started."""
        self.jobs: dict[JobKey, SupervisedJob] = {}
        self._server, self._pods, self._supervisions = server, pods, supervisions
        self._events, self._make = events, make
        self._owners = OwnerCache(server, asyncio.get_running_loop().time)
        self.changed = asyncio.Event()
        self._by_uid: dict[str, SupervisedJob] = {}
        self._cut_off = (-math.inf, False)  # when the connected members were counted, and the result

    def job_of(self, pod_uid: str) -> SupervisedJob | None:
        """Return the job of a pod; None if it has none, or none yet."""
        return self._by_uid.get(pod_uid)

    def is_cut_off(self) -> bool:
        """Return True if fewer than half of the running members of all jobs are connected."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._cut_off[0] >= REACH_S:
            self._cut_off = now_s, too_few_connected(job.reach for job in self.jobs.values())
        return self._cut_off[1]

    async def run(self) -> None:
        """Reconcile on every change and every `AGAIN_S` until cancelled; then end the tasks of all jobs."""
        try:
            await asyncio.gather(self._pods.synced.wait(), self._supervisions.synced.wait())
            while True:
                self.changed.clear()
                self._owners.forget_old()
                try:
                    await self.reconcile()
                except (ApiError, OSError) as error:  # running jobs continue, and the rest is retried
                    log.warning("jobs not reconciled", extra={"error": str(error)})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), AGAIN_S)
                await asyncio.sleep(GATHER_S)
        finally:
            await asyncio.gather(*(each.close() for each in self.jobs.values()))

    async def find_unsupervised(self) -> None:
        """Record an event about each pod that asks for Holdfast but was not injected. Never returns.

        The webhook was not available when such a pod was created.
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

        One kind may be unreadable while others are not: its API may be served by a component that is down.
        """
        by_key: dict[JobKey, list[_OwnedPod]] = {}
        unread: set[JobKey] = set()
        for pod in tuple(self._pods.objects.values()):
            try:
                chain = await self._owners.chain(pod)
            except ServerUnreachable as error:
                log.warning("owner not read", extra={"pod": pod["metadata"]["name"], "error": str(error)})
                known = self._by_uid.get(pod["metadata"]["uid"])
                unread |= {known.key} if known is not None else set()
                continue
            key = job_membership.job_key(pod, chain)
            if isinstance(key, NotAdopted):
                self._refuse(pod, key.why)
                continue
            by_key.setdefault(key, []).append((pod, chain))
        groups = (self._group(key, found) for key, found in by_key.items())
        return {each.key: each for each in groups if each is not None}, unread

    def _group(
        self, key: JobKey, found: list[tuple[KubernetesObject, job_membership.OwnerChain]]
    ) -> PodGroup | None:
        pods = [pod for pod, _ in found]
        said = job_membership.read_group(pods, found[0][1])
        adopted: list[tuple[Adopted, PodMember]] = []
        for pod, chain in found:
            result = job_membership.adopt(pod, chain, said)
            if isinstance(result, NotAdopted):
                self._refuse(pod, result.why)
            else:
                adopted.append((result, read_pod(pod, _container(pod))))
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
        members = tuple(member for _, member in sorted(adopted, key=lambda each: each[0].order))
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
    """Return the identity of a pod that asks for Holdfast but never reached the webhook; {} for others."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    asks = annotations.get(pod_layout.INJECT) == "true"
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if not asks or ended or pod_layout.NOT_INJECTED in annotations:
        return {}
    identity = {key: metadata.get(key) for key in ("name", "namespace", "uid")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": identity}


def _container(pod: KubernetesObject) -> str:
    """Return the name of the training container that the webhook recorded, or else of the first container."""
    try:
        name = pod_facts.read(pod).injected.get("container")
    except UnfitObject:
        name = None
    containers: list[Any] = pod["spec"]["containers"]
    return name if isinstance(name, str) else str(containers[0]["name"])
