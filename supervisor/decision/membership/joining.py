"""Let members join a smaller group, and leave them out again if they fail before its first step. Pure.

A smaller group trains without the members that join it. If such a member fails before all ranks have
completed a step, for example because its node is faulty, the group continues without it. The failure is not
counted against the script or the state, and the group trains longer before a member joins it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.view import faults
from supervisor.view.model import SECOND_NS, JobState, Policy, View

HOLD_S = 10.0  # a smaller group trains at least this long before it grows; each further loss doubles it
MAX_HOLD_S = 640.0
RECENT_S = 3600.0  # only losses of the last hour make the time longer


def least_members(policy: Policy) -> int:
    """Return the smallest number of members that the group continues with."""
    return min(policy.min_members or policy.members, policy.members)


def grows_at_ns(memory: JobState) -> int:
    """Return the earliest time at which a smaller group may grow, whether it is training or restarting."""
    now_ns = memory.started_ns
    since_ns = now_ns - int(RECENT_S * SECOND_NS)
    sizes = [memory.full_members, *(each.members for each in memory.sizes)]
    losses = sum(
        after < before and each.at_ns >= since_ns
        for each, before, after in zip(memory.sizes, sizes, sizes[1:], strict=False)
    )
    hold_s = min(MAX_HOLD_S, HOLD_S * 2 ** max(0, losses - 1))
    return now_ns + int(hold_s * SECOND_NS)


def may_grow(view: View) -> bool:
    """True if the group is smaller than requested and has trained for long enough to grow.

    It does not grow while the decision cannot be recorded.
    """
    memory = view.memory
    return bool(memory.reduced_by) and not view.unrecorded and view.now_ns >= grows_at_ns(memory)


def on_trial(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members that made the group larger and can be left out; () after it has completed a step."""
    memory = view.memory
    left = len(memory.placement) - len(memory.joined)
    if memory.settled or not memory.resizable or left < max(1, least_members(policy)):
        return ()
    return memory.joined


def failed(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members on trial that made the group fail; the next generation leaves them out.

    If no fault names a cause, for example because only broken connections are known, all members on trial are
    returned: without them, the group was able to train.
    """
    trial = on_trial(view, policy) if view.memory.phase == "securing" else ()
    found = faults.of_incident(view, policy) if trial else ()
    if not found:
        return ()
    cause = faults.explanation(view, found)
    if cause.member in trial:
        return (cause.member,)
    is_unnamed = faults.is_only_victim(cause) or (cause.kind == "hang" and not cause.member)
    return trial if is_unnamed else ()


def barred(view: View) -> frozenset[str]:
    """Return the members that failed when they joined and may not get ranks until the group may grow."""
    memory = view.memory
    if not memory.dropped or view.now_ns >= grows_at_ns(memory):
        return frozenset()
    return frozenset(memory.dropped)


def joined_after(memory: JobState, placement: Sequence[str], kept: Sequence[int]) -> tuple[str, ...]:
    """Return `JobState.joined` for a group whose members keep the positions `kept`.

    A member that replaces a member on trial is also on trial.
    """
    if not memory.placement:
        return ()
    return tuple(
        name
        for name, position in zip(placement, kept, strict=True)
        if position < 0 or memory.placement[position] in memory.joined
    )


def dropped_after(view: View, policy: Policy, placement: Sequence[str]) -> tuple[str, ...]:
    """Return `JobState.dropped` for a group with this placement."""
    there = {each.name for each in view.members if each.exists}
    known = dict.fromkeys((*view.memory.dropped, *failed(view, policy)))
    return tuple(name for name in known if name in there and name not in placement)
