"""Decide which standby pods a job needs and which it no longer needs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from supervisor.cluster.pods import PodMember
from supervisor.cluster.standbys.pod_copy import standby_number

# How long a job's standbys have to end after the job has ended. After that, they are deleted. This is longer
# than the default of `grace_s`.
END_S = 60.0
# How long a standby may be without a node. It was created for nodes that had room. If it is still not
# scheduled, the room is gone, or the scheduler sees an obstacle that Holdfast does not. While it waits, it is
# in the way of other pods.
PLACE_S = 10.0
# How long the owner's new pod may be without a node while a group waits for a member and an init container of
# a standby does not end. The standby may be what keeps that pod away, and may itself wait for it: the init
# container of Kubeflow's workers waits for the master.
START_S = 20.0

NOT_PLACED = f"the scheduler found no node for it within {PLACE_S:g} s"


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """The numbers of the standbys to create, and the standbys to delete, each with the reason."""

    create: tuple[int, ...] = ()
    delete: tuple[tuple[PodMember, str], ...] = ()


def plan(
    pods: Collection[PodMember],
    placement: Collection[str],
    members: int,
    standbys: int,
    *,
    may_create: bool,
    over_s: float | None,
    unplaced_s: Mapping[str, float] = MappingProxyType({}),
    kept_out: str = "",
) -> StandbyPlan:
    """Return what to do about a job's standbys.

    A standby that has taken over ranks is still counted in `standbys`, because the owner replaces the lost
    pod, and the replacement becomes the next standby. The owner's pods beyond the size of the job are also
    standbys.

    Args:
        pods: All pods of the job.
        placement: The members that have ranks.
        members: The number of members that the job trains with.
        standbys: The number of standbys that the user requests.
        may_create: True while the job trains, because only then is a standby useful, and only then is there a
            pod to copy.
        over_s: How long ago the job ended, or 0 while it ends; None before that.
        unplaced_s: How long each standby without a node has been without one, by uid.
        kept_out: The name of a pod of the owner that has had no node for `START_S`, because pods such as the
            standbys are in its way; "" if there is none.
    """
    ours = sorted((each for each in pods if each.is_standby), key=lambda each: standby_number(each.name))
    left = [each for each in ours if not each.is_leaving]
    if over_s is not None:
        why = "the job has ended"
        delete = [(each, why) for each in left if _is_over(each, each.member in placement, over_s)]
        return StandbyPlan((), tuple(delete))
    delete = [(each, "it has ended") for each in left if each.has_ended]
    there = [each for each in left if not each.has_ended]
    owners = sum(1 for each in pods if not (each.is_standby or each.is_leaving or each.has_ended))
    wanted = max(0, standbys - max(0, owners - members))
    active = [each for each in there if each.member in placement]
    idle = [each for each in there if each.member not in placement]
    taken = {each.node for each in pods if each.member in placement and not each.has_ended and each.node}
    for each in idle:
        if kept_out and not may_create and each.is_initializing:
            delete.append((each, f"its init containers do not end, and pod {kept_out} finds no node"))
        elif each.node in taken:
            delete.append((each, f"node {each.node} now has a member with ranks"))
        elif unplaced_s.get(each.uid, 0.0) >= PLACE_S:
            delete.append((each, NOT_PLACED))
    going = {each.uid for each, _ in delete}
    idle = [each for each in idle if each.uid not in going]
    surplus = max(0, len(active) + len(idle) - wanted)
    # Delete the least useful ones first: those that are not running yet, then the newest.
    idle.sort(key=lambda each: (each.is_running, -standby_number(each.name)))
    delete += [(each, "the job has enough pods without it") for each in idle[:surplus]]
    lacking = wanted - len(active) - len(idle)
    create = _free_numbers(ours, lacking) if may_create and lacking > 0 else ()
    return StandbyPlan(create, tuple(delete))


def _is_over(standby: PodMember, has_ranks: bool, over_s: float) -> bool:
    """Return True if a standby of a job that has ended is no longer needed.

    A standby that trained at the end is kept, like the owner's pods, because its log may be all that is left
    of the run. It is deleted together with the Supervision. Its pod ends some seconds after its ranks, when
    the sidecar has ended, so until then, its container does not run although the pod has not ended.
    """
    if has_ranks:
        return not standby.has_ended and over_s >= END_S
    return standby.has_ended or not standby.is_running or over_s >= END_S


def _free_numbers(ours: Sequence[PodMember], count: int) -> tuple[int, ...]:
    """Return the lowest numbers that no standby has, not even one that is being deleted."""
    used = {standby_number(each.name) for each in ours}
    free = (number for number in range(1, len(used) + count + 1) if number not in used)
    return tuple(sorted(free)[:count])
