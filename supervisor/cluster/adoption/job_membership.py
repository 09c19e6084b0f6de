"""Find the job that a pod belongs to, its size, and the preferred order of its pods. Pure.

All objects are untrusted JSON from the API server. If a value is missing, contradictory or of the wrong type,
the result is a `NotAdopted` with the reason, never an exception or a guess. A group of the wrong size would
wait for members that never connect, or start without some of its members.

The supervisor assigns the ranks. It never reads RANK or WORLD_SIZE, because some controllers use them to
count pods, and others to count processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.fileio.strict_json import brief
from supervisor.admission import pod_layout
from supervisor.admission.pod_layout import GROUP, MAX_INJECTED, MEMBERS, NOT_INJECTED, NPROC_PER_NODE
from supervisor.cluster.adoption import pod_facts
from supervisor.cluster.adoption.owner_size import owner_size
from supervisor.cluster.adoption.pod_facts import CUT, MAX_REFERENCES, PodFacts
from supervisor.cluster.adoption.untrusted_json import (
    API_VERSION,
    KIND,
    NAME,
    UID,
    UnfitObject,
    items,
    matching,
    metadata_of,
    refuse,
    table,
    text,
)
from supervisor.cluster.adoption.workload_kinds import WorkloadKind, shipped

MAX_OWNERS = 8  # the longest known chain, for a worker of a LeaderWorkerSet, has four owners

T = TypeVar("T")


class OwnerReference(NamedTuple):
    """The identity of an owner, and the key for looking it up."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


Find = Callable[[OwnerReference], object]


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner whose kind is in the table.

    `kind` is None for a link, an object that only connects the pods with the owner above it.
    """

    reference: OwnerReference
    content: Mapping[str, Any]
    kind: WorkloadKind | None


@dataclass(frozen=True, slots=True)
class OwnerChain:
    """The owners of a pod whose kinds are in the table, nearest first.

    `beyond` is the next owner. It is not looked up, because its kind, such as CronJob, is not in the table.
    `unread` is an owner that must be read before the chain is complete. If the chain is unusable, `why` says
    why.
    """

    owners: tuple[Owner, ...] = ()
    beyond: OwnerReference | None = None
    unread: OwnerReference | None = None
    why: str = ""

    @property
    def workloads(self) -> tuple[tuple[Owner, WorkloadKind], ...]:
        """The owners that are workloads, each with its row in the table; the topmost first."""
        return tuple((each, each.kind) for each in reversed(self.owners) if each.kind is not None)

    @property
    def idle(self) -> frozenset[str]:
        """The replica types that do not train."""
        return frozenset(name for _, kind in self.workloads for name in kind.idle)


@dataclass(frozen=True, slots=True)
class JobKey:
    """The identity of a job. All of its pods share it, and no other pods do.

    `name` is the name of the job's Supervision. The other fields describe the job's owner, and are empty for
    a group of pods without an owner. `api_version` is not compared, because pods that were created before and
    after an upgrade can state different versions.
    """

    namespace: str
    name: str
    uid: str = ""
    kind: str = ""
    api_version: str = field(default="", compare=False)
    owner_name: str = ""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A pod that is a member of a job.

    `order` sorts a job's members as their controller numbers them. Ranks are preferably placed in this order,
    so a recreated pod gets its predecessor's ranks. `order` is () if the pod has no number.
    """

    key: JobKey
    members: int  # the number of members that the job trains with; additional ones are standbys
    nproc: int  # the number of ranks of each member
    order: tuple[int, ...]
    replica_type: str  # from the pod's label, in lower case; "" if its owner has only one type


class PlaceInJob(NamedTuple):
    """The job of a pod that trains, and its place there: see `Adopted.order`."""

    key: JobKey
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotAdopted:
    """A pod that is not a member of a job. `why` says why.

    `unread` is an owner that could not be read. The result can change after the owner is read.
    """

    why: str
    unread: OwnerReference | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the pods of one job state about the job. If they disagree, `why` describes the disagreement."""

    pods: int = 0  # the number of pods that train and have not ended
    members: str = ""  # "4" or "2:4"
    nproc: int = 0
    count: int = 0  # the size of a group of pods without an owner
    # the name of one of these pods without the annotated number of members; "" if all have it
    silent: str = ""
    why: str = ""


def top_owner(pod: object, find: Find) -> OwnerChain:
    """Return the owners of `pod` up to the topmost one whose kind is in the table.

    Args:
        pod: The pod as JSON.
        find: Returns the object for a reference, such as the `get` method of a mapping. Any value that is not
            a mapping, such as None, means that the object is missing or cannot be read.
    """
    owners: list[Owner] = []
    try:
        child = metadata_of(pod, "the pod")
        namespace = matching(NAME, child.get("namespace"), "the pod's namespace")
        seen = {matching(UID, child.get("uid"), "the pod's uid")}
        while (reference := _controller(child, namespace)) is not None:
            if not _is_known(reference):
                return OwnerChain(tuple(owners), beyond=reference)
            if len(owners) >= MAX_OWNERS or reference.uid in seen:
                refuse(f"the pod's owners form a cycle, or there are more than {MAX_OWNERS}")
            seen.add(reference.uid)
            content = find(reference)
            if not isinstance(content, Mapping):
                return OwnerChain(tuple(owners), unread=reference, why=f"{reference} cannot be read")
            if cut := content.get(CUT):
                refuse(f"{reference} {cut}")
            child = metadata_of(content, str(reference))
            if child.get("uid") != reference.uid:
                why = f"{reference} has a different uid than the pod's owner: it was replaced"
                return OwnerChain(tuple(owners), unread=reference, why=why)
            kind = shipped().find(reference.api_version, reference.kind)
            owners.append(Owner(reference, content, kind))
    except UnfitObject as error:
        return OwnerChain(tuple(owners), why=str(error))
    return OwnerChain(tuple(owners))


def _controller(metadata: Mapping[str, Any], namespace: str) -> OwnerReference | None:
    """Return the owner that controls an object; None if there is none.

    DLRover does not mark its references as controlling. If no reference is marked, use the reference to a
    known kind, because references to other kinds exist only for garbage collection.
    """
    raw = items(metadata.get("ownerReferences"), "ownerReferences", MAX_REFERENCES)
    tables = [table(each, "an owner reference") for each in raw]
    found = [_reference(each, namespace) for each in tables if each.get("controller") is True]
    if not found:
        others = [_reference(each, namespace) for each in tables]
        found = [each for each in others if _is_known(each)]
    if len(found) > 1:
        refuse(f"{found[0]} and {found[1]} both own the pod")
    return found[0] if found else None


def _reference(raw: Mapping[str, Any], namespace: str) -> OwnerReference:
    return OwnerReference(
        matching(API_VERSION, raw.get("apiVersion"), "apiVersion in ownerReferences"),
        matching(KIND, raw.get("kind"), "kind in ownerReferences"),
        namespace,
        matching(NAME, raw.get("name"), "name in ownerReferences"),
        matching(UID, raw.get("uid"), "uid in ownerReferences"),
    )


def _is_known(owner: OwnerReference) -> bool:
    kinds = shipped()
    is_link = kinds.is_link(owner.api_version, owner.kind)
    return is_link or kinds.find(owner.api_version, owner.kind) is not None


def job_key(pod: object, owners: OwnerChain) -> JobKey | NotAdopted:
    """Return the key of the job that `pod` belongs to, whether or not it trains."""
    try:
        return _key(pod_facts.read(pod), owners)
    except UnfitObject as error:
        return NotAdopted(str(error), owners.unread)


def queue_label(owners: OwnerChain) -> str:
    """Return the label of an owner by which Kueue admits the owner's pods; "" if there is none.

    Kueue does not copy it to the pods of most kinds: https://kueue.sigs.k8s.io/docs/tasks/run/jobs/
    """
    for owner in owners.owners:
        metadata = owner.content.get("metadata")
        labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
        if isinstance(labels, Mapping) and labels.get(pod_layout.KUEUE_QUEUE):
            return f"{pod_layout.KUEUE_QUEUE} of {owner.reference}"
    return ""


def place_of(pod: object, owners: OwnerChain) -> PlaceInJob | NotAdopted:
    """Return the place that `pod` has in its job if it trains, whether or not it is injected."""
    try:
        facts = pod_facts.read(pod)
        replica_type = _replica_type(facts, owners)
        if replica_type in owners.idle:
            refuse(f"the pod is of the replica type {brief(replica_type)}, which does not train")
        return PlaceInJob(_key(facts, owners), _order(facts, owners, replica_type))
    except UnfitObject as error:
        return NotAdopted(str(error), owners.unread)


def read_group(pods_of_group: Iterable[object], owners: OwnerChain) -> GroupFacts:
    """Return what the pods of a job state about it. Pods that have ended or do not train are ignored.

    Args:
        pods_of_group: The pods with the same `job_key`, as JSON.
        owners: The owners of any of these pods.
    """
    members, nproc = _Agreement(MEMBERS, ""), _Agreement("the number of ranks", 0)
    count = _Agreement("the size of the group", 0)
    idle = owners.idle
    uids = set()
    silent = ""
    for each in pods_of_group:
        try:
            pod = pod_facts.read(each)
            if pod.has_ended or not pod.nproc or _replica_type(pod, owners) in idle:
                continue
            uids.add(pod.uid)
            annotated = pod_facts.members(pod)
            members.add(annotated, pod)
            silent = silent or ("" if annotated else pod.name)
            nproc.add(pod.nproc, pod)
            if not owners.workloads:
                count.add(_count(pod), pod)
        except UnfitObject as error:
            return GroupFacts(why=f"among the pods of the job: {error}")
    return GroupFacts(len(uids), members.value, nproc.value, count.value, silent if members.value else "")


class _Agreement(Generic[T]):
    """A value that several pods must agree on. Pods that state no value are ignored."""

    def __init__(self, what: str, nothing: T) -> None:
        self.what = what
        self.value = nothing
        self.pod = ""  # the first pod that states a value

    def add(self, value: T, pod: PodFacts) -> None:
        if not value:
            return
        if not self.value:
            self.value, self.pod = value, pod.name
        if self.value != value:
            refuse(f"{self.what} is {self.value} on pod {self.pod} and {value} on pod {pod.name}")


def adopt(
    pod: object, owners: OwnerChain, pods_of_group: Iterable[object] | GroupFacts
) -> Adopted | NotAdopted:
    """Return `pod` as a member of its job, or the reason why it is not a member.

    Args:
        pod: The pod as JSON.
        owners: The result of `top_owner` for the pod.
        pods_of_group: The pods with the same `job_key`, with or without `pod`. To adopt all n pods of a group
            without reading n x n pods, pass the result of `read_group` instead.
    """
    try:
        facts = pod_facts.read(pod)
        key = _key(facts, owners)
        replica_type = _replica_type(facts, owners)
        if replica_type in owners.idle:
            refuse(f"the pod is of the replica type {brief(replica_type)}, which does not train")
        if not facts.nproc:
            refuse(_why_not_injected(facts))
        if not isinstance(pods_of_group, GroupFacts):
            pods_of_group = read_group((pod, *pods_of_group), owners)
        members = _members(facts, owners, pods_of_group, replica_type)
        if members * facts.nproc > pod_layout.MAX_JOB_RANKS:
            refuse(
                f"the job has {members} members of {facts.nproc} ranks each, more than the"
                f" {pod_layout.MAX_JOB_RANKS:,} ranks that Holdfast supports"
            )
        return Adopted(key, members, facts.nproc, _order(facts, owners, replica_type), replica_type)
    except UnfitObject as error:
        return NotAdopted(str(error), owners.unread)


def _why_not_injected(pod: PodFacts) -> str:
    reason = text(pod.annotations.get(NOT_INJECTED), NOT_INJECTED, MAX_INJECTED)
    if reason:
        return f"the pod was not injected: {brief(reason, 200)}"
    return f"the pod was not injected, and its {NPROC_PER_NODE} is not a number"


def _key(pod: PodFacts, owners: OwnerChain) -> JobKey:
    if owners.why:
        refuse(owners.why)
    if owners.workloads:
        owner, kind = owners.workloads[0]
        name = _job_name(pod, owner.reference, kind)
        named = pod.annotation(GROUP)
        if named not in ("", name, owner.reference.name):
            refuse(f"{GROUP} is {brief(named)}, but the pod belongs to {owner.reference}")
        return _owned(owner.reference, name)
    group = pod_facts.first(pod, (source for kind in shipped().pods for source in kind.group))
    if group:
        return JobKey(pod.namespace, matching(NAME, group, "the name of the pod's group"))
    if owners.beyond is None:
        refuse(f"the pod has neither an owner nor {GROUP}")
    return _owned(owners.beyond, owners.beyond.name)


def _owned(owner: OwnerReference, name: str) -> JobKey:
    return JobKey(owner.namespace, name, owner.uid, owner.kind, owner.api_version, owner.name)


def _job_name(pod: PodFacts, owner: OwnerReference, kind: WorkloadKind) -> str:
    """Return the owner's name, followed by a number if this is not the first of the owner's groups."""
    if not kind.instance:
        return owner.name
    number = pod.label(kind.instance)
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        refuse(f"the pod of {owner} has no number in its label {kind.instance}")
    return f"{owner.name}-{int(number)}" if int(number) else owner.name


def _replica_type(pod: PodFacts, owners: OwnerChain) -> str:
    sources = (source for _, kind in owners.workloads for source in kind.replica_type)
    return pod_facts.first(pod, sources).lower()


def _members(pod: PodFacts, owners: OwnerChain, group: GroupFacts, replica_type: str) -> int:
    """Return the number of members that the job trains with."""
    if group.why:
        refuse(group.why)
    if group.nproc not in (0, pod.nproc):
        refuse(f"the pod has {pod.nproc} ranks, but other pods of its job have {group.nproc}")
    annotated = group.members or pod_facts.members(pod)
    found = _number(annotated, pod, owners, group, replica_type)
    if not group.silent:
        return found
    # Only some pods have the annotation, and a single pod must not change the size of the whole job.
    try:
        otherwise = _number("", pod, owners, group, replica_type)
    except UnfitObject:  # without the annotation, the number would be unclear
        return found
    if otherwise != found:
        refuse(
            f"{MEMBERS} is {annotated} on some pods of the job, but pod {group.silent} lacks it, and the job"
            f" would have {otherwise} members without it"
        )
    return found


def _number(annotated: str, pod: PodFacts, owners: OwnerChain, group: GroupFacts, replica_type: str) -> int:
    """Return the number of members that the job trains with. `annotated` is the annotation's value, or ""."""
    stated = annotated or pod_facts.stated_members(pod)
    low, _, high = stated.partition(":")
    if annotated and not high:
        return int(low)
    size = _size(owners, replica_type) if owners.workloads else group.count or _count(pod)
    if not size and not stated:
        refuse(f"neither the pod's owner nor {MEMBERS} says how many members the job has")
    if high:  # an elastic job has the owner's size, or else the number of existing pods, within the range
        return min(max(size or group.pods, int(low)), int(high))
    if size and stated and size != int(low):
        owner = f"{owners.workloads[0][0].reference} has" if owners.workloads else "its group has"
        mismatch = f"the pod's command is for {low} pods, but {owner} {size} that train"
        refuse(f"{mismatch}: correct it, or set {MEMBERS}")
    return size or int(low)


def owners_members(pod: object, owners: OwnerChain) -> int:
    """Return how many pods a valid pod's owner wants to train; 0 if the owner does not state it clearly."""
    try:
        return _size(owners, _replica_type(pod_facts.read(pod), owners))
    except UnfitObject:
        return 0


def stated_in_command(pod: object) -> str:
    """Return the number of members that the webhook read from a valid pod's command, or ""."""
    return pod_facts.stated_members(pod_facts.read(pod))


def states_members(pod: object, owners: OwnerChain) -> bool:
    """Return True if a valid pod states a number of members that its owner does not.

    The number in its command may come from PET_NNODES, where a controller writes the size of the owner. A
    command that contradicts the owner makes a pod invalid.
    """
    facts = pod_facts.read(pod)
    annotated = pod_facts.members(facts)
    if annotated or owners.workloads:
        return ":" not in (annotated or ":")
    return ":" not in (pod_facts.stated_members(facts) or ":")


def _count(pod: PodFacts) -> int:
    """Return the size of a group of pods without an owner, as this pod states it; 0 if it does not."""
    return pod_facts.count(pod, (source for kind in shipped().pods for source in kind.count))


def _size(owners: OwnerChain, replica_type: str) -> int:
    """Return the number of pods that train, from the topmost owner that states it; 0 if none does."""
    workloads = owners.workloads
    for number, (owner, kind) in enumerate(workloads):
        if not kind.below:
            return owner_size(owner.content, str(owner.reference), kind, owners.idle, replica_type)
        nearer = workloads[number + 1 : number + 2]
        if not nearer or nearer[0][1].kind != kind.below:
            refuse(f"the pod does not belong to a {kind.below} of {owner.reference}")
    return 0


def _order(pod: PodFacts, owners: OwnerChain, replica_type: str) -> tuple[int, ...]:
    """Return the pod's index numbers, after the position of its replica type if several types train."""
    kinds = [kind for _, kind in owners.workloads] if owners.workloads else shipped().pods
    kind = next((each for each in kinds if each.index), None)
    found = [pod_facts.index(pod, sources) for sources in kind.index] if kind is not None else []
    numbers = tuple(number for number in found if number is not None)
    if not numbers:
        fallback = pod_facts.index(pod, shipped().fallback_index)
        numbers = () if fallback is None else (fallback,)
    if kind is None or len(kind.trains) < 2 or not replica_type:
        return numbers
    position = kind.trains.index(replica_type) if replica_type in kind.trains else len(kind.trains)
    return (position, *numbers)
