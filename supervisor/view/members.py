"""The condition of members: which report, can be controlled, may come back, or can take ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.view.model import MemberView, Policy, View

QUIET_S = 1.5  # a member reports every half second, and at once if its state is requested
MUTE_S = 2.5  # early enough that a new sidecar can report before the member counts as lost
RENEW_AGAIN_S = 60.0  # if a new sidecar is silent again so soon, the sidecar is not the cause
_S = 1_000_000_000


def is_reporting(member: MemberView) -> bool:
    """True if the member's last report is recent enough to be taken as its present state."""
    return member.exists and member.connected and member.silent_s < QUIET_S


def silent_sidecars(view: View, renewed_ns: Mapping[str, int]) -> tuple[str, ...]:
    """Return the members whose sidecars do not report any more and should be inspected and replaced.

    `renewed_ns` contains, by member, when that was last requested.
    """
    return tuple(
        member.name
        for member in view.members
        if member.exists and member.report is not None and member.silent_s > MUTE_S
        if member.name not in renewed_ns or view.now_ns - renewed_ns[member.name] > RENEW_AGAIN_S * 1e9
    )


def is_controllable(member: MemberView) -> bool:
    """True if a member reports and can also end and start ranks."""
    return is_reporting(member) and not unresponsive_launcher(member)


def unresponsive_launcher(member: MemberView) -> str:
    """Return why the launcher of a member does not answer although the member may report; "" if it answers.

    The member's ranks continue to train, and the states in its memory can be read, but no process can stop
    the ranks or start others.
    """
    return member.report.launcher_silent if member.report is not None else ""


def lacks_launcher_report(member: MemberView) -> bool:
    """True if a member reports and its launcher runs, but the launcher's first report is still missing."""
    return is_controllable(member) and member.report is not None and member.report.launcher is None


def is_lost(view: View, member: MemberView, policy: Policy) -> bool:
    """True if a member cannot come back as it was: it is gone, or was silent for too long."""
    return timeout_left_s(view, member, policy) <= 0


def timeout_left_s(view: View, member: MemberView, policy: Policy) -> float:
    """Return how much longer a member may be silent before it counts as lost; 0 if it is gone.

    A new member that has never reported has as long as the group may take to form.
    """
    if not member.exists:
        return 0.0
    known = member.report is not None or member.name in view.memory.placement
    limit_s = policy.member_timeout_s if known else policy.form_s
    return max(0.0, limit_s - member.silent_s)


def is_ready(member: MemberView, nproc: int) -> bool:
    """True if every rank of the member could start at once."""
    launcher = member.report.launcher if member.report else None
    if not is_controllable(member) or launcher is None:
        return False
    return launcher.strategy == "cold" or len(launcher.parked) >= nproc


def eligible_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members for the next generation: first those that had ranks, in the same order.

    There are fewer than requested if no more are usable.
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
    """True if this member's ranks died of signals twice in a row and the group did no step in between."""
    memory = view.memory
    cause = memory.incident.faults[0] if memory.incident and memory.incident.faults else None
    last = memory.history[-1] if memory.history else None
    if cause is None or last is None or cause.kind != "crash" or last.kind != "crash":
        return False
    return cause.member == last.member == name and cause.step <= last.step


def recoverable_members(view: View, policy: Policy, patience_s: float) -> dict[str, int]:
    """Return the members with ranks that are away, and until when each may come back with what it holds.

    Each has `patience_s` of its own: a sidecar that restarts late in a long recovery has as much time as one
    at the beginning. A member that is silent for `--member-timeout` is lost before that, and not included.
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
    """Return the members with ranks that have never reported to this supervisor, and may still do so.

    The supervisor has taken over, and only these members know what they hold: nothing is decided without
    them.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.placement
        and member.report is None
        and not is_lost(view, member, policy)
    )


def next_timeout_s(view: View, policy: Policy, at_most_s: float) -> float:
    """Return the time until the next member would be lost if none reported again; at most `at_most_s`."""
    timeouts_s = [timeout_left_s(view, m, policy) for m in view.members]
    return max(0.01, min([at_most_s, *(each for each in timeouts_s if each > 0)]))
