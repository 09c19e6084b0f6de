"""Decide from a job's pods whether they continue its run or begin another. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.pods import PodMember, first_start, member_name
from supervisor.view import unknown_generation
from supervisor.view.model import ENDING_PHASES, JobState, View


def is_new_run(memory: JobState, key: JobKey, pods: Collection[PodMember]) -> bool:
    """Return True if the run in `memory` has ended and all current pods were created after it.

    This applies only to pods without an owner, because only a user can create them again. An owner may
    replace pods even after its job has finished.
    """
    if memory.phase not in ("stopping", "ended") or key.uid or not pods:
        return False
    return are_gone({*memory.placement, *memory.lost}, pods)


def is_abandoned(memory: JobState, pods: Collection[PodMember]) -> bool:
    """Return True if the run in `memory` has started ranks and trains, but none of its pods is left."""
    if not memory.placement or memory.phase in ENDING_PHASES or not pods:
        return False
    return _has_no_pod(memory, pods)


def may_change_size(view: View, pods: Collection[PodMember]) -> bool:
    """Return True if no pod has ranks of the run, nor ranks that this supervisor does not know yet."""
    memory = view.memory
    if memory.placement:
        return _has_no_pod(memory, pods)
    unheard = [each for each in view.members if each.exists and each.report is None]
    return memory.phase == "forming" and not unheard and not unknown_generation.newest(view)


def are_gone(members: Set[str], pods: Collection[PodMember]) -> bool:
    """Return True if no pods of these members are left, except pods that are being deleted."""
    return _first_members(pod for pod in pods if not pod.is_leaving).isdisjoint(map(first_start, members))


def _has_no_pod(memory: JobState, pods: Collection[PodMember]) -> bool:
    """Return True if no pod has ranks of the run in `memory`, nor had any."""
    left = _first_members(pod for pod in pods if not pod.has_ended)
    return left.isdisjoint(map(first_start, (*memory.placement, *memory.lost)))


def _first_members(pods: Iterable[PodMember]) -> set[str]:
    """Return the members that the pods were when their containers first started."""
    return {member_name(pod.name, pod.uid, 0) for pod in pods}
