"""Form the group of a job from its pods: its members, their number, and the settings of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from supervisor.admission import pod_layout
from supervisor.admission import settings as pod_settings
from supervisor.cluster.adoption import job_membership, pod_facts
from supervisor.cluster.adoption.job_membership import Adopted, GroupFacts, JobKey, NotAdopted, OwnerChain
from supervisor.cluster.pods import (
    PodGroup,
    PodMember,
    first_start,
    held_policy,
    pod_policy,
    read_pod,
)
from supervisor.cluster.standbys.pod_copy import standby_number
from supervisor.cluster.supervision.contents import OngoingRun
from supervisor.kubernetes.client import KubernetesObject
from supervisor.view.model import Policy

NOT_SUPERVISED = "NotSupervised"  # an event's reason
SIZE_KEPT = "SizeKept"  # the reason of events about a job that was resized during a run
_LAST = 1_000_000_000  # sorts standbys behind the owner's pods, whose indexes are smaller
CHANGE_IGNORED = "ChangeIgnored"  # the reason of events about invalid changes to a running job's pods
_KEPT = "the job keeps its pods, size and settings"


class OwnedPod(NamedTuple):
    """A pod and its owners. `why` says why the pod no longer seems to belong to its job, or is ""."""

    pod: KubernetesObject
    owners: OwnerChain
    why: str


class FormedGroup(NamedTuple):
    """The pods of a job, its standbys, the group that they form, and the events to record about them."""

    found: Sequence[OwnedPod]
    standbys: Sequence[KubernetesObject]
    group: PodGroup | None
    refusals: Sequence[Refusal]


class Refusal(NamedTuple):
    """An event to record about a pod."""

    pod: KubernetesObject
    reason: str
    why: str


def form_group(
    key: JobKey, found: Sequence[OwnedPod], before: PodGroup | None = None
) -> tuple[PodGroup | None, list[Refusal]]:
    """Return the group that the pods of one job form, or None if no pod is valid, and the events to record.

    `before` is the current group of an existing job. Its pods remain members until they are gone. While one
    of them is no longer valid, or the pods disagree, the group keeps its size and settings, and accepts only
    new pods that agree with them.
    """
    known = {each.uid: each for each in before.pods} if before is not None else {}
    valid = [each for each in found if not each.why]
    facts = (
        job_membership.read_group([each.pod for each in valid], valid[0].owners) if valid else GroupFacts()
    )
    adopted: list[tuple[OwnedPod, Adopted]] = []
    refusals: list[Refusal] = []
    leaving: list[PodMember] = []
    for each in found:
        result = NotAdopted(each.why) if each.why else job_membership.adopt(each.pod, each.owners, facts)
        member = known.get(each.pod["metadata"]["uid"])
        if isinstance(result, Adopted):
            adopted.append((each, result))
        elif member is None:
            refusals.append(Refusal(each.pod, NOT_SUPERVISED, result.why))
        elif before is not None and not has_ended(each.pod):
            return _kept_group(before, found)
        else:
            leaving.append(_member(each.pod, member.order))
    if not adopted:
        return (replace(before, pods=tuple(leaving)) if before is not None else None), refusals
    # Take the settings from a pod that has not ended and is already a member, if there is one.
    source, first = min(
        adopted, key=lambda each: (has_ended(each[0].pod), each[0].pod["metadata"]["uid"] not in known)
    )
    try:
        policy, given = _settings(source.pod, first)
    except pod_settings.PodSettingsError as error:
        if before is not None and source.pod["metadata"]["uid"] in known:
            group, others = _kept_group(before, found)
            return group, [Refusal(source.pod, CHANGE_IGNORED, f"{error}; {_KEPT}"), *others]
        refusals.append(Refusal(source.pod, NOT_SUPERVISED, str(error)))
        return (replace(before, pods=tuple(leaving)) if before is not None else None), refusals
    members = [*leaving, *(_member(each.pod, result.order) for each, result in adopted)]
    pods = tuple(sorted(members, key=lambda each: each.order))
    queue = job_membership.queue_label(source.owners)
    return PodGroup(key, first.members, first.nproc, policy, given, pods, queue), refusals


def with_standbys(group: PodGroup | None, standbys: Sequence[KubernetesObject]) -> PodGroup | None:
    """Return the group with its standbys, after all other pods. They do not affect its size or settings."""
    if group is None:
        return None
    owners = tuple(each for each in group.pods if not each.is_standby)
    found = (_member(each, (_LAST, standby_number(each["metadata"]["name"]))) for each in standbys)
    return replace(group, pods=(*owners, *sorted(found, key=lambda each: each.order)))


def _kept_group(before: PodGroup, found: Sequence[OwnedPod]) -> tuple[PodGroup, list[Refusal]]:
    """Return the group `before` with its pods that still exist, plus new pods that agree with it."""
    known = {each.uid: each for each in before.pods}
    members: list[PodMember] = []
    refusals: list[Refusal] = []
    for each in found:
        member = known.get(each.pod["metadata"]["uid"])
        result = _alone(each, before)
        if member is not None:
            members.append(_member(each.pod, member.order))
            is_unclear = each.owners.unread is not None or has_ended(each.pod)
            if isinstance(result, NotAdopted) and not is_unclear:
                refusals.append(_kept(each, before, result))
        elif isinstance(result, NotAdopted):
            refusals.append(Refusal(each.pod, NOT_SUPERVISED, result.why))
        else:
            members.append(_member(each.pod, result.order))
    return replace(before, pods=tuple(sorted(members, key=lambda each: each.order))), refusals


def _kept(each: OwnedPod, group: PodGroup, result: NotAdopted) -> Refusal:
    """Return the event about a member that is no longer valid. Its owner may have another size now."""
    now = job_membership.owners_members(each.pod, each.owners)
    if now in (0, group.members) or job_membership.stated_in_command(each.pod) != str(group.members):
        return Refusal(each.pod, CHANGE_IGNORED, f"{result.why}; {_KEPT}")
    why = f"the job now has {now} members, but the current run keeps {group.members} until it ends"
    return Refusal(each.pod, SIZE_KEPT, why)


def _alone(each: OwnedPod, group: PodGroup) -> Adopted | NotAdopted:
    """Return a pod as a member of `group`, regardless of the other pods of the group."""
    if each.why:
        return NotAdopted(each.why)
    facts = job_membership.read_group([each.pod], each.owners)
    result = job_membership.adopt(each.pod, each.owners, replace(facts, pods=group.members))
    if isinstance(result, NotAdopted) or (result.members, result.nproc) == (group.members, group.nproc):
        return result
    if result.nproc == group.nproc and not job_membership.states_members(each.pod, each.owners):
        return result  # its owner has another size now
    stated = f"{result.members} members with {result.nproc} ranks each"
    known = f"{group.members} members with {group.nproc} ranks each"
    return NotAdopted(f"the pod specifies {stated}, but its job has {known}")


def _settings(pod: KubernetesObject, first: Adopted) -> tuple[Policy, dict[str, str]]:
    """Return the policy and the settings in a pod's annotations. Raises `PodSettingsError`."""
    annotations = pod["metadata"].get("annotations") or {}
    policy = pod_policy(annotations, first.members, first.nproc)
    given = {
        name.removeprefix(pod_layout.PREFIX): text
        for name, text in annotations.items()
        if name in pod_settings.ANNOTATIONS
    }
    return policy, given


def _member(pod: KubernetesObject, order: tuple[int, ...]) -> PodMember:
    return replace(read_pod(pod, pod_facts.training_container(pod)), order=order)


def has_ended(pod: KubernetesObject) -> bool:
    """Return True if the pod has ended or is being deleted."""
    phase = (pod.get("status") or {}).get("phase")
    return pod["metadata"].get("deletionTimestamp") is not None or phase in pod_facts.ENDED_PHASES


def ongoing_group(run: OngoingRun, pods: Mapping[tuple[str, str], KubernetesObject]) -> PodGroup:
    """Return the group of a run: its pods that still exist, and its size and settings.

    `pods` contains all pods, by namespace and by the name of each pod's first member. This name contains the
    pod's name and the first digits of its uid, so it distinguishes the pod from a later pod of the same name.
    """
    found: dict[str, PodMember] = {}
    for number, member in enumerate(run.members):
        pod = pods.get((run.key.namespace, first_start(member)))
        if pod is not None:
            found.setdefault(pod["metadata"]["uid"], _member(pod, (number,)))
    policy = held_policy(run.settings, *run.size)
    return PodGroup(run.key, *run.size, policy, run.settings, tuple(found.values()))
