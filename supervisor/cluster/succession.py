"""Decide from a job's pods whether they continue its run or begin another. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.pods import PodMember, first_start, member_name
from supervisor.view import unknown_generation
from supervisor.view.model import ENDING_PHASES, End, JobState, View

# How long an owner may take to create the pods that a run lacks after all others have failed. If the owner
# creates none within this time, the owner itself has failed.
OWNER_S = 30.0


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
    """Return True if no pod has ranks of the run, or may have ranks that are not known yet."""
    memory = view.memory
    if memory.placement:
        return _has_no_pod(memory, pods)
    unheard = [each for each in view.members if each.exists and each.report is None]
    return memory.phase == "forming" and not unheard and not unknown_generation.newest(view)


def end_before_start(
    ended: Collection[PodMember], others: Collection[PodMember], members: int, lasts_s: float
) -> End | None:
    """Return how a run ends if its ranks were never started; None while they may still be started.

    If the run ends with an exit code other than 0, any pods that its owner creates later form a new run, so
    nothing is lost. After exit code 0, such pods would be ordered to end, so all pods must have ended.

    Args:
        ended: The pods of this run that have ended, without being deleted. They may be gone by now.
        others: The run's other pods.
        members: The number of members of the run.
        lasts_s: The time since the last of the run's pods ended or disappeared.
    """
    if not ended or any(not pod.has_ended for pod in others):
        return None
    is_complete = len(ended) >= members
    failed = [pod for pod in ended if pod.exit_code]
    if not failed:
        why = "all pods of the job ended with exit code 0 before its ranks were started"
        return End(0, why) if is_complete else None
    if not is_complete and lasts_s < OWNER_S:
        return None
    first = min(failed, key=lambda pod: (not pod.last_words, pod.order, pod.name))
    why = f"pod {first.name} ended with exit code {first.exit_code} before its ranks were started"
    return End(first.exit_code or 1, f"{why}: {first.last_words}" if first.last_words else why)


def are_gone(members: Set[str], pods: Collection[PodMember]) -> bool:
    """Return True if no pods of these members are left, except pods that are being deleted."""
    return _first_members(pod for pod in pods if not pod.is_leaving).isdisjoint(map(first_start, members))


def _has_no_pod(memory: JobState, pods: Collection[PodMember]) -> bool:
    """Return True if all pods that have, or had, ranks of the run in `memory` have ended."""
    left = _first_members(pod for pod in pods if not pod.has_ended)
    return left.isdisjoint(map(first_start, (*memory.placement, *memory.lost)))


def _first_members(pods: Iterable[PodMember]) -> set[str]:
    """Return the name of each pod's first member, from when its container first started."""
    return {member_name(pod.name, pod.uid, 0) for pod in pods}
