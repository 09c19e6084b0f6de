"""Choose the members that the ranks of the next generation run on. Pure."""

from __future__ import annotations

from supervisor.view import members
from supervisor.view.model import Policy, View


def choose_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members for the next generation; fewer than requested if not enough are usable.

    A member with ranks keeps them. A standby that is ready replaces a member that cannot be used or whose
    ranks keep failing.
    """
    memory = view.memory
    usable = {m.name: m for m in view.members if members.is_usable(view, m, policy)}
    standbys = [
        name for name, m in usable.items() if name not in memory.seats and members.is_ready(m, memory.nproc)
    ]
    if not memory.placement:
        return tuple(standbys[: policy.members])
    chosen: list[str] = []
    for name in memory.placement:
        if name in usable and not (standbys and _keeps_failing(view, name)):
            chosen.append(name)
        elif standbys:
            chosen.append(standbys.pop(0))
    return tuple(chosen)


def _keeps_failing(view: View, name: str) -> bool:
    """True if this member's ranks crashed twice in a row, and the group completed no step in between."""
    memory = view.memory
    cause = memory.incident.faults[0] if memory.incident and memory.incident.faults else None
    last = memory.history[-1] if memory.history else None
    if cause is None or last is None or cause.kind != "crash" or last.kind != "crash":
        return False
    return cause.member == last.member == name and cause.step <= last.step
