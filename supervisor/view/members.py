"""Who is there: which members speak, which may come back, which cannot do what they are told. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.view.model import MemberView, Policy, View

QUIET_S = 1.5  # a member reports every half second, and at once when it is asked for its state
MUTE_S = 2.5  # so that another sidecar can speak before a member counts as lost
AGAIN_S = 60.0  # a sidecar that is mute again so soon after another took its place is not what is wrong


def is_reporting(member: MemberView) -> bool:
    """True when what a member has told is what it still is, as far as anybody can know."""
    return member.exists and member.connected and member.silent_s < QUIET_S


def silent_sidecars(view: View, renewed_ns: Mapping[str, int]) -> tuple[str, ...]:
    """Return the members whose sidecars should be looked at and replaced: none of their reports comes.

    `renewed_ns` has when that was last asked for each.
    """
    return tuple(
        member.name
        for member in view.members
        if member.exists and member.report is not None and member.silent_s > MUTE_S
        if member.name not in renewed_ns or view.now_ns - renewed_ns[member.name] > AGAIN_S * 1e9
    )


def is_controllable(member: MemberView) -> bool:
    """True when a member that speaks can also end and start ranks."""
    return is_reporting(member) and not unresponsive_launcher(member)


def unresponsive_launcher(member: MemberView) -> str:
    """Return why a member cannot obey though it may speak, "" when it can: its launcher does not answer.

    Its ranks train on, and what they left in its memory can be read, but nobody can stop them or make others.
    """
    return member.report.launcher_silent if member.report is not None else ""


def lacks_launcher_report(member: MemberView) -> bool:
    """True when a member speaks whose sidecar has not heard what its launcher, which is there, has to say."""
    return is_controllable(member) and member.report is not None and member.report.launcher is None


def is_lost(view: View, member: MemberView, policy: Policy) -> bool:
    """True when a member cannot come back as it was: gone, or silent for too long."""
    return timeout_left_s(view, member, policy) <= 0


def timeout_left_s(view: View, member: MemberView, policy: Policy) -> float:
    """Return for how much longer a member may say nothing before it counts as lost; 0 when it is gone.

    One that is new, and was never heard of, has as long as the group may take to form.
    """
    if not member.exists:
        return 0.0
    known = member.report is not None or member.name in view.memory.placement
    limit_s = policy.member_timeout_s if known else policy.form_s
    return max(0.0, limit_s - member.silent_s)


# Which members can take the ranks of the next generation, and who is still to be waited for. Pure.


_S = 1_000_000_000


def is_ready(member: MemberView, nproc: int) -> bool:
    """True when every rank of the member could start at once."""
    launcher = member.report.launcher if member.report else None
    if not is_controllable(member) or launcher is None:
        return False
    return launcher.strategy == "cold" or len(launcher.parked) >= nproc


def eligible_members(view: View, policy: Policy) -> tuple[str, ...]:
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
    if not is_controllable(member) or is_lost(view, member, policy):
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


def recoverable_members(view: View, policy: Policy, patience_s: float) -> dict[str, int]:
    """Return the members with ranks that are away, and until when each may come back with what it holds.

    Each has `patience_s` of its own: a sidecar that begins again late in a long recovery has as much as one
    at its beginning. One that says nothing for `--member-timeout` is lost before that, and not among them.
    """
    return {
        member.name: max(view.memory.since_ns, member.heard_ns, member.well_ns) + int(patience_s * _S)
        for member in view.members
        if member.name in view.memory.placement
        and not _is_usable(view, member, policy)
        and not is_lost(view, member, policy)
        and not unresponsive_launcher(member)
    }


def unheard_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members with ranks that this supervisor has never heard, and that may yet speak.

    It has taken over, and nobody but they can say what they hold: nothing is decided without them.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.placement
        and member.report is None
        and not is_lost(view, member, policy)
    )


def next_timeout_s(view: View, policy: Policy, at_most_s: float) -> float:
    """Return after which time a member that says nothing more would count as lost."""
    left = [timeout_left_s(view, m, policy) for m in view.members]
    return max(0.01, min([at_most_s, *(each for each in left if each > 0)]))
