"""Evict pods that the webhook missed and that a job of this leader lacks, as `rule` decides.

While no job lacks a member, this reads nothing. If a job does, the pods of its namespace that are not members
are listed, rarely if this finds nothing. Before a pod is evicted, it and its owner are read again, and a dry
run proves that its successor would be injected. The eviction is conditional on the uid and the version that
were read, so a pod that has changed in between stays. Nothing is evicted without a confirmed term, because
another supervisor may lead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from supervisor.admission import pod_layout
from supervisor.cluster.adoption import pod_facts
from supervisor.cluster.adoption.job_membership import JobKey, NotAdopted, PlaceInJob
from supervisor.cluster.adoption.uninjected import was_missed
from supervisor.cluster.missed import injection_proof, recreation
from supervisor.cluster.missed.notes import MissedNotes
from supervisor.cluster.missed.rule import Evictions, MissedPod, MissingMembers, Order, plan
from supervisor.kubernetes.client import PODS, ApiServer, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import ApiError, Conflict, EvictionBlocked, NotFound
from supervisor.kubernetes.leadership import sent_within

log = logging.getLogger(__name__)

ROUND_S = 2.5  # the time between two rounds
# The time until a job's namespace is read again, after it was read without anything to do once, twice, and
# more often in a row. A member can be missing for hours, because no node has room.
LOOK_S = (2.5, 5.0, 10.0, 20.0, 30.0)
MAX_NAMESPACES = 16  # that are read in one round
MAX_PODS = 2_000  # missed pods of one namespace that are considered
SLICE = 20  # pods that are considered before other work may run
REFUSED_S = 20.0  # the time until a pod that must stay is examined again

EVICTED = "MissedPodEvicted"  # reasons of events
REMAINS = "MissedPodRemains"


class WaitingJob(Protocol):
    """A supervised job, as this module sees it."""

    missed: MissedNotes

    @property
    def missing(self) -> MissingMembers | None: ...
    @property
    def supervision(self) -> tuple[str, str]: ...
    @property
    def open_incident(self) -> str: ...
    def record(self, reason: str, message: str, bad: bool) -> None: ...


@dataclass(slots=True)
class _Search:
    """What is known about the missed pods of one job that lacks members."""

    job: WaitingJob
    missing: MissingMembers
    due_s: float
    looks: int = 0  # in a row that found nothing
    seen_s: dict[str, float] = field(default_factory=dict)  # since when each missed pod is known, by uid
    examine_s: dict[str, float] = field(default_factory=dict)  # not to be examined before this time, by uid
    told: dict[str, str] = field(default_factory=dict)  # why each pod stays, as last reported, by uid

    def forget_others(self, uids: Collection[str]) -> None:
        """Forget all pods except these."""
        for known in (self.seen_s, self.examine_s, self.told):
            for uid in [each for each in known if each not in uids]:
                del known[uid]


class MissedPods:
    """Replaces the missed pods of all jobs of one leader."""

    def __init__(
        self,
        server: ApiServer,
        jobs: Callable[[], Mapping[JobKey, WaitingJob]],
        place_of: Callable[[KubernetesObject], PlaceInJob | NotAdopted],
        record: Callable[[KubernetesObject, str, str], None],
        term_left_s: Callable[[], float],
        is_dry: Callable[[], bool] = lambda: False,
    ) -> None:
        """`jobs` returns the jobs that this process supervises.

        `place_of` returns the job of a pod; its result may change while owners are read. `record` records an
        event about a pod: its reason and its message. `term_left_s` returns how long this process certainly
        still leads. `is_dry` returns True while actions are only announced.
        """
        self._server, self._jobs, self._place_of, self._record = server, jobs, place_of, record
        self._term_left_s, self._is_dry = term_left_s, is_dry
        self._searches: dict[JobKey, _Search] = {}
        self._evictions: dict[tuple[JobKey, Order], Evictions] = {}

    async def run(self) -> NoReturn:
        """Work until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.round(now_s())
            except (ApiError, OSError) as error:
                log.warning("missed pods not examined", extra={"error": str(error)})

    async def round(self, now_s: float) -> None:
        """Examine the jobs that lack members and are due. Raises `ApiError` or `OSError`."""
        self._note_missing(now_s)
        due = {key: each for key, each in self._searches.items() if each.due_s <= now_s}
        for namespace in list(dict.fromkeys(key.namespace for key in due))[:MAX_NAMESPACES]:
            here = {key: each for key, each in due.items() if key.namespace == namespace}
            for each in here.values():  # even if a request fails
                each.due_s = now_s + LOOK_S[min(each.looks, len(LOOK_S) - 1)]
                each.looks += 1
            found = await self._find(namespace, here, now_s)
            for key, search in here.items():
                await self._replace(key, search, found.get(key, []), now_s)

    def _note_missing(self, now_s: float) -> None:
        """Begin to search for the members that jobs lack, and forget the jobs that lack none."""
        jobs = self._jobs()
        for key, job in jobs.items():
            missing, search = job.missing, self._searches.get(key)
            if missing is None:
                continue
            if search is None or search.job is not job:
                self._searches[key] = _Search(job, missing, now_s)
            elif search.missing != missing:
                search.missing, search.due_s, search.looks = missing, now_s, 0
        for key, search in tuple(self._searches.items()):
            if jobs.get(key) is not search.job or search.job.missing is None:
                search.job.missed.set_now((), "")
                del self._searches[key]
        self._evictions = {
            place: each for place, each in self._evictions.items() if not each.is_forgotten(now_s)
        }

    async def _find(
        self, namespace: str, searches: Mapping[JobKey, _Search], now_s: float
    ) -> dict[JobKey, list[MissedPod]]:
        """Return the missed pods of these jobs, which are in one namespace."""
        candidates: list[KubernetesObject] = []

        def examine(pod: KubernetesObject) -> KubernetesObject:
            if was_missed(pod) and len(candidates) < MAX_PODS:
                candidates.append(pod_facts.kept(pod))
            return {}  # a namespace may have thousands of other pods

        await self._server.list(PODS, namespace, labels=f"!{pod_layout.MEMBER_LABEL}", prune=examine)
        found: dict[JobKey, list[MissedPod]] = {}
        for number, pod in enumerate(candidates):
            if number % SLICE == 0:
                await asyncio.sleep(0)
            place = self._place_of(pod)
            if isinstance(place, NotAdopted) or place.key not in searches:
                continue
            metadata, search = pod["metadata"], searches[place.key]
            uid = str(metadata["uid"])
            seen_s = now_s - search.seen_s.setdefault(uid, now_s)
            has_owner = recreation.controller_of(pod) is not None
            missed = MissedPod(namespace, metadata["name"], uid, place.order, has_owner, seen_s)
            found.setdefault(place.key, []).append(missed)
        for key, search in searches.items():
            search.forget_others({each.uid for each in found.get(key, ())})
        return found

    async def _replace(self, key: JobKey, search: _Search, pods: list[MissedPod], now_s: float) -> None:
        if pods:
            search.looks = 0
        evictions = {order: each for (job, order), each in self._evictions.items() if job == key}
        found = plan(search.missing, pods, evictions, now_s)
        stays = dict(found.leave)
        for pod in found.evict:
            if search.examine_s.get(pod.uid, 0.0) <= now_s:
                stays[pod] = await self._evict(key, search, pod, now_s)
            else:
                stays[pod] = search.told.get(pod.uid, "")
        self._tell(search, {pod: why for pod, why in stays.items() if why})

    async def _evict(self, key: JobKey, search: _Search, pod: MissedPod, now_s: float) -> str:
        """Evict a pod, or return why it stays for now. Returns "" also if it has changed or is gone."""
        search.examine_s[pod.uid] = now_s + REFUSED_S
        place = (key, pod.order)
        before = self._evictions.get(place, Evictions())
        try:
            found = await self._server.get(PODS, pod.name, pod.namespace)
            if found["metadata"].get("uid") != pod.uid or not was_missed(found):
                return ""
            if why := await self._why_stays(search, found):
                return why
            if self._is_dry():
                return "Holdfast would evict it now, but a dry run only announces this"
            if self._term_left_s() <= 0 or self._jobs().get(key) is not search.job:
                return ""
            if search.job.missing != search.missing:
                search.due_s = now_s  # the plan is out of date
                return ""
            version = str(found["metadata"]["resourceVersion"])
            self._evictions[place] = before.after(now_s)  # it counts even if the answer is lost
            await sent_within(
                self._term_left_s, self._server.evict(pod.namespace, pod.name, pod.uid, version)
            )
        except ApiError as error:
            self._evictions[place] = before
            if isinstance(error, NotFound | Conflict):  # it is gone or has changed: examine it again
                search.examine_s[pod.uid] = now_s
                return ""
            if isinstance(error, EvictionBlocked):
                return f"a disruption budget does not allow its eviction now: {error.message}"
            return f"the API server refuses a request: {error}"
        except OSError as error:  # the next examination shows whether the pod was evicted
            log.warning("missed pod not replaced", extra={"pod": pod.name, "error": str(error)})
            return search.told.get(pod.uid, "")
        self._report_eviction(search, pod, found)
        return ""

    async def _why_stays(self, search: _Search, pod: KubernetesObject) -> str:
        """Return why evicting a pod would not help its job; "" if it would."""
        reference = recreation.controller_of(pod)
        if reference is None or recreation.kind_of(reference) is None:
            return recreation.why_not(pod, reference or {}, {})
        group, _, version = str(reference["apiVersion"]).rpartition("/")
        kind = ResourceKind(group, version, f"{str(reference['kind']).lower()}s")
        owner = await self._server.get(kind, str(reference["name"]), pod["metadata"]["namespace"])
        if why := recreation.why_not(pod, reference, owner):
            return why
        return await injection_proof.why_not_injected(self._server, pod, *search.job.supervision)

    def _report_eviction(self, search: _Search, pod: MissedPod, found: KubernetesObject) -> None:
        owner = recreation.controller_of(found) or {}
        why = (
            f"pod {pod.name} was created without Holdfast, because the webhook did not respond, and the job"
            " lacks it. The webhook works again, so the pod is evicted, and its owner,"
            f" {owner.get('kind')} {owner.get('name')}, creates it again"
        )
        log.warning("missed pod evicted", extra={"pod": pod.name, "namespace": pod.namespace})
        search.told.pop(pod.uid, None)
        search.job.missed.add(why, search.job.open_incident)
        search.job.record(EVICTED, why, False)
        self._record(found, EVICTED, why)

    def _tell(self, search: _Search, stays: Mapping[MissedPod, str]) -> None:
        """Report each pod that stays, and why, whenever the reason changes."""
        sentences = [_sentence(pod, why) for pod, why in stays.items()]
        search.job.missed.set_now(sentences, search.job.open_incident)
        for (pod, why), sentence in zip(stays.items(), sentences, strict=True):
            if search.told.get(pod.uid) != why:
                search.told[pod.uid] = why
                search.job.record(REMAINS, sentence, True)
                self._record(_identity(pod), REMAINS, sentence)


def _sentence(pod: MissedPod, why: str) -> str:
    return (
        f"the job lacks pod {pod.name}, which was created without Holdfast, because the webhook did not"
        f" respond. It is not evicted: {why}"
    )


def _identity(pod: MissedPod) -> KubernetesObject:
    metadata = {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
