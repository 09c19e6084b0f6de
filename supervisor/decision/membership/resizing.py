"""Continue with fewer members while a lost one has no replacement, and grow back to full size. Pure.

The ranks of a smaller group are numbered without gaps, so each surviving rank may get another number. It
keeps its own private state. A rank that is added later starts from a copy of another rank's private state,
with random numbers of its own. A script must opt in to all this, either with `session.on_resize` or by taking
its samples from `holdfast.Batches`.

Each change of the size costs a restart. A group therefore waits briefly for a replacement before it shrinks,
and trains for a while before it grows. If a member comes and goes, the group trains longer before it grows.

A group is resized only while decisions can be recorded. If a resize were not recorded, the next supervisor
would not know the new size. It would mistake the state of some of the ranks for a complete state, or would
make the script adapt twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.decision import resume_point
from supervisor.decision.membership import joining, placement
from supervisor.view import interrupted_work, members, reports
from supervisor.view.model import SECOND_NS, Fault, GroupSize, JobState, Policy, View

SHRINK_S = 3.0  # how long a stopped group waits for a replacement to connect
CONNECTED_S = 10.0  # the total wait for a replacement that has connected but is not ready
SIZES = 64  # how many changes of the size to remember; no state is older than that


def is_enough(view: View, policy: Policy, chosen: Sequence[str]) -> bool:
    """True if the next generation can start with the members that `placement.choose_members` returned."""
    if len(chosen) >= policy.members:
        return True
    at_ns = shrinks_at_ns(view, policy, chosen)
    return at_ns is not None and view.now_ns >= at_ns


def shrinks_at_ns(view: View, policy: Policy, chosen: Sequence[str]) -> int | None:
    """Return the time at which the group continues with only the chosen members; None if it must not.

    It must not shrink while the decision cannot be recorded.

    A group that is already smaller does not wait again if all of its members are present, except those
    that failed when they joined it.
    """
    memory = view.memory
    if not memory.resizable or not max(1, joining.least_members(policy)) <= len(chosen) < policy.members:
        return None
    if len(chosen) >= len(memory.placement):
        return memory.since_ns
    if view.unrecorded:
        return None
    if len(chosen) >= len(memory.placement) - len(joining.failed(view, policy)):
        return memory.since_ns
    wait_s = CONNECTED_S if _is_replacement_in_sight(view, policy, chosen) else SHRINK_S
    return memory.since_ns + int(wait_s * SECOND_NS)


def _is_replacement_in_sight(view: View, policy: Policy, chosen: Sequence[str]) -> bool:
    """True if a member without ranks has connected, and might be ready soon."""
    memory = view.memory
    return any(
        m.exists and m.connected and m.departure is None and not members.is_lost(view, m, policy)
        for m in view.members
        if m.name not in memory.positions and m.name not in memory.lost and m.name not in chosen
    )


def why_not(view: View, policy: Policy) -> str:
    """Return why the group waits for a replacement although the user allows fewer members; "" if it does not.

    The reason is known only after all ranks have completed a step.
    """
    memory = view.memory
    if joining.least_members(policy) >= policy.members or not memory.settled or memory.resizable:
        return ""
    return (
        f"--min-members {policy.min_members} has no effect, and the group will wait for a replacement if it"
        f" loses a member, because {fixed_by(view)}"
    )


def can_resize(view: View) -> bool:
    """True if all ranks of the generation report that the script can run with another number of ranks."""
    found = reports.ranks(view)
    return len(found) >= view.memory.world_size and all(each.marks.resizes for each in found)


def fixed_by(view: View) -> str:
    """Return a clause that says why the script cannot run with another number of ranks."""
    for rank in reports.ranks(view):
        if not rank.marks.resizes and rank.marks.fixed_by:
            return rank.marks.fixed_by
    return "the script does not call holdfast.join() and session.protect()"


# -- growing


def due_growth(view: View, policy: Policy) -> tuple[Fault, ...]:
    """Return the planned stop of a smaller group that a ready member can join now; () if there is none.

    As with a departure, the group stops between two steps, and work outside of a step is not interrupted.
    """
    memory = view.memory
    if not memory.settled or not joining.may_grow(view):
        return ()
    chosen = placement.choose_members(view, policy)
    fresh = [name for name in chosen if name not in memory.positions]
    if len(chosen) <= len(memory.placement) or not fresh:
        return ()
    if not resume_point.holds_state(view) or interrupted_work.find(view, ()):
        return ()
    size = f"from {len(memory.placement)} to {len(chosen)} of {policy.members} members"
    ready = f"member {fresh[0]} is" if len(fresh) == 1 else f"members {', '.join(fresh)} are"
    detail = f"{ready} ready: the group grows {size}"
    step = reports.furthest_step(view)
    return (Fault("growth", -1, fresh[0], step, view.now_ns, "growth", detail),)


# -- the numbers of the ranks


def sizes_after(view: View, policy: Policy, generation: int) -> tuple[GroupSize, ...]:
    """Return `JobState.sizes` for the next generation, whose members are those chosen now."""
    memory = view.memory
    kept = placement.kept_positions(view, policy)
    if not memory.placement or kept == tuple(range(len(memory.placement))):
        return memory.sizes
    return (*memory.sizes, GroupSize(generation, len(kept), kept, view.now_ns))[-SIZES:]


def states_of(view: View, policy: Policy, saved_by: int, saved_size: int) -> tuple[int, ...]:
    """Return `Launch.states_of` for a state that `saved_size` members saved in the generation `saved_by`."""
    memory = view.memory
    found = [
        _position_then(memory, position, saved_by, saved_size)
        for position in placement.kept_positions(view, policy)
    ]
    return () if found == list(range(saved_size)) else tuple(found)


def _position_then(memory: JobState, position: int, saved_by: int, saved_size: int) -> int:
    """Return the position that a member's ranks had in the generation `saved_by`; -1 for none."""
    for size in reversed(memory.sizes):
        if size.generation <= saved_by or position < 0:
            break
        position = size.carried[position] if position < len(size.carried) else -1
    return position if position < saved_size else -1
