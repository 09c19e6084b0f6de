"""Which members can take the ranks of the next generation, and who is still to be waited for. Pure."""

from __future__ import annotations

from supervisor import presence
from supervisor.view import MemberView, Policy, View

_S = 1_000_000_000


def is_ready(member: MemberView, nproc: int) -> bool:
    """True when every rank of the member could start at once."""
    launcher = member.report.launcher if member.report else None
    if not presence.obeys(member) or launcher is None:
        return False
    return launcher.strategy == "cold" or len(launcher.parked) >= nproc


def able(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members for the next generation: those that had ranks first, in their places.

    Fewer than asked for when there are no more.
    """
    memory = view.memory
    usable = {m.name: m for m in view.members if _is_usable(view, m, policy)}
    standbys = [
        name for name, m in usable.items() if name not in memory.placement and is_ready(m, memory.nproc)
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


def _is_usable(view: View, member: MemberView, policy: Policy) -> bool:
    if not presence.obeys(member) or presence.is_lost(view, member, policy):
        return False
    return member.report is not None and member.report.launcher is not None


def _keeps_failing(view: View, name: str) -> bool:
    """True when this member's ranks died of signals twice in a row without the group getting on."""
    memory = view.memory
    cause = memory.incident.faults[0] if memory.incident and memory.incident.faults else None
    last = memory.history[-1] if memory.history else None
    if cause is None or last is None or cause.kind != "crash" or last.kind != "crash":
        return False
    return cause.member == last.member == name and cause.step <= last.step


def missing(view: View, policy: Policy, patience_s: float) -> dict[str, int]:
    """Return the members with ranks that are away, and until when each may come back with what it holds.

    Each has `patience_s` of its own: a sidecar that begins again late in a long recovery has as much as one
    at its beginning. One that says nothing for `--member-timeout` is lost before that, and not among them.
    """
    return {
        member.name: max(view.memory.since_ns, member.heard_ns, member.well_ns) + int(patience_s * _S)
        for member in view.members
        if member.name in view.memory.placement
        and not _is_usable(view, member, policy)
        and not presence.is_lost(view, member, policy)
        and not presence.deaf(member)
    }


def unknown(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members with ranks that this supervisor has never heard, and that may yet speak.

    It has taken over, and nobody but they can say what they hold: nothing is decided without them.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.placement
        and member.report is None
        and not presence.is_lost(view, member, policy)
    )


def next_silence_s(view: View, policy: Policy, at_most_s: float) -> float:
    """Return after which time a member that says nothing more would count as lost."""
    left = [presence.silence_left_s(view, m, policy) for m in view.members]
    return max(0.01, min([at_most_s, *(each for each in left if each > 0)]))
