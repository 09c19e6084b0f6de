"""Decide which of the pods that the webhook missed are evicted, so that their owners create them again. Pure.

The webhook misses a pod if it does not respond while the pod is created. The pod then runs without Holdfast.
If a supervised job lacks this pod, as a member or as its next standby, it would lack it until somebody
deletes the pod.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from supervisor.cluster.pods import PodMember
from supervisor.view.model import ENDING_PHASES, JobState, Policy

# How long a missed pod must have been seen before it is evicted, because the mirror of the members' pods may
# be behind.
SETTLE_S = 5.0
# The time after an eviction before the pod of the same member is evicted again, if it was missed again. The
# length is the limit: after that, somebody must find out why.
AGAIN_S = (30.0, 60.0, 120.0)
MAX_EVICTIONS = len(AGAIN_S)
FORGET_S = 3600.0  # after this time, earlier evictions of a member no longer count
MOST_AT_ONCE = 16  # evictions of pods of one job in one round

Order = tuple[int, ...]  # the place of a pod in its job, as its controller numbers it; () without a number


@dataclass(frozen=True, slots=True)
class MissingMembers:
    """What a supervised job lacks: `count` pods of its owner. Its other pods have the places in `taken`."""

    count: int
    taken: frozenset[Order]


@dataclass(frozen=True, slots=True)
class MissedPod:
    """A pod of a supervised job that requests Holdfast and that the webhook missed."""

    namespace: str
    name: str
    uid: str
    order: Order
    has_owner: bool  # a controller owns it
    seen_s: float  # for how long it has been seen


@dataclass(frozen=True, slots=True)
class Evictions:
    """In how many rounds pods of one member were evicted because the webhook had missed them.

    Pods without an index share one record, and one round may evict several of them.
    """

    count: int = 0
    last_s: float = 0.0  # when the last of them was evicted

    def after(self, now_s: float) -> Evictions:
        """Return the record after another eviction in the round at `now_s`."""
        return self if self.count and now_s == self.last_s else Evictions(self.count + 1, now_s)

    def is_forgotten(self, now_s: float) -> bool:
        return now_s - self.last_s >= FORGET_S


@dataclass(frozen=True, slots=True)
class MissedPlan:
    """The pods to evict, if the webhook works again, and the pods that stay, each with the reason."""

    evict: tuple[MissedPod, ...] = ()
    leave: tuple[tuple[MissedPod, str], ...] = ()


def missing_members(
    memory: JobState, policy: Policy, pods: Collection[PodMember], *, is_stopping: bool
) -> MissingMembers | None:
    """Return what a job lacks; None if it lacks no pod of its owner, or ends.

    If a standby takes over the ranks of a lost member, the owner's new pod is meant to be the next standby,
    so the job lacks that pod, although all of its ranks run. Without a request for standbys, it lacks
    nothing.

    Args:
        memory: The state of the job.
        policy: The policy of the job's run.
        pods: All pods of the job that Holdfast supervises, including standbys.
        is_stopping: True if a user has asked for the end of the job.
    """
    if memory.phase in ENDING_PHASES or is_stopping:
        return None
    trains_whole = memory.phase == "running" and memory.settled and len(memory.placement) >= policy.members
    if trains_whole and not policy.standby:
        return None
    there = [each for each in pods if not (each.is_leaving or _has_failed(each))]
    owners = [each for each in there if not each.is_standby]
    count = min(policy.members - len(owners), policy.members + policy.standby - len(there))
    if count <= 0 or not there:  # if all members are gone, the owner may be ending the job
        return None
    return MissingMembers(count, frozenset(each.order for each in owners if each.order))


def plan(
    job: MissingMembers, pods: Sequence[MissedPod], evictions: Mapping[Order, Evictions], now_s: float
) -> MissedPlan:
    """Return what to do about the missed pods of a job.

    No more pods are evicted than the job lacks members, and none that has the place of another member.
    """
    wanted = [each for each in pods if each.order not in job.taken]
    wanted.sort(key=lambda each: (each.order, each.name))
    evict: list[MissedPod] = []
    leave: list[tuple[MissedPod, str]] = []
    for each in wanted[: job.count]:
        before = evictions.get(each.order, Evictions())
        if not each.has_owner:
            leave.append((each, "it has no owner that would create it again: delete it, and create it again"))
        elif before.count >= MAX_EVICTIONS:
            leave.append((each, _tried(before.count)))
        elif each.seen_s >= SETTLE_S and _is_due(before, now_s):
            evict.append(each)
    return MissedPlan(tuple(evict[:MOST_AT_ONCE]), tuple(leave))


def _is_due(before: Evictions, now_s: float) -> bool:
    return not before.count or now_s - before.last_s >= AGAIN_S[before.count - 1]


def _tried(count: int) -> str:
    return (
        f"the pods of this member were evicted {count} times, and each new one was created without Holdfast"
        " again: find out why (holdfast doctor), and then delete the pod"
    )


def _has_failed(pod: PodMember) -> bool:
    """Return True for a pod that ended with a failure, which its owner replaces."""
    return pod.has_ended and pod.exit_code != 0
