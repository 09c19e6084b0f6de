"""Classify members: which ones report, can be controlled, are usable, or may come back. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.view.model import SECOND_NS, MemberView, Policy, View

QUIET_S = 1.5  # a member reports every half second, and immediately on request
MUTE_S = 2.5  # after this silence, a new sidecar still has time to report before the member is lost
RENEW_AGAIN_S = 60.0  # if a new sidecar falls silent within this time, another one would not help


def is_reporting(member: MemberView) -> bool:
    """True if the member's last report is recent enough to describe its current state."""
    return member.exists and member.connected and member.silent_s < QUIET_S


def silent_sidecars(view: View, renewed_ns: Mapping[str, int]) -> tuple[str, ...]:
    """Return the members whose sidecars have stopped reporting and should be inspected and replaced.

    `renewed_ns` maps members to the time of the last request to replace their sidecar.
    """
    return tuple(
        member.name
        for member in view.members
        if member.exists and member.report is not None and member.silent_s > MUTE_S
        if member.name not in renewed_ns or view.now_ns - renewed_ns[member.name] > RENEW_AGAIN_S * 1e9
    )


def is_controllable(member: MemberView) -> bool:
    """True if a member reports, and can also end and start ranks."""
    return is_reporting(member) and not unresponsive_launcher(member)


def unresponsive_launcher(member: MemberView) -> str:
    """Return why a member's launcher does not respond; "" if it responds.

    Such a member may still report, its ranks continue to train, and its snapshots can be read. But no process
    can stop its ranks or start others.
    """
    return member.report.launcher_silent if member.report is not None else ""


def lacks_launcher_report(member: MemberView) -> bool:
    """True if a member reports and its launcher runs, but the launcher has not reported yet."""
    return is_controllable(member) and member.report is not None and member.report.launcher is None


def is_lost(view: View, member: MemberView, policy: Policy) -> bool:
    """True if a member no longer exists or has been silent for too long."""
    return timeout_left_s(view, member, policy) <= 0


def timeout_left_s(view: View, member: MemberView, policy: Policy) -> float:
    """Return how many more seconds a member can be silent before it counts as lost; 0 if it is gone.

    A new member that has never reported has as much time as the group has to form.
    """
    if not member.exists:
        return 0.0
    known = member.report is not None or member.name in view.memory.seats
    limit_s = policy.member_timeout_s if known else policy.form_s
    return max(0.0, limit_s - member.silent_s)


def is_ready(member: MemberView, nproc: int) -> bool:
    """True if all ranks of the member could start immediately."""
    launcher = member.report.launcher if member.report else None
    if not is_controllable(member) or launcher is None:
        return False
    return launcher.strategy == "cold" or len(launcher.parked) >= nproc


def is_usable(view: View, member: MemberView, policy: Policy) -> bool:
    """True if a member can be controlled, and its launcher has reported."""
    if not is_controllable(member) or is_lost(view, member, policy):
        return False
    return member.report is not None and member.report.launcher is not None


def recoverable_members(view: View, policy: Policy, patience_s: float) -> dict[str, int]:
    """Return the deadlines of unusable members with ranks that may still return with their snapshots.

    Each deadline is `patience_s` after the member was last known to be well. A sidecar that restarts late in
    a long recovery therefore has as much time as one that restarts early. Members that have been silent for
    `--member-timeout` are lost and are not included.
    """
    return {
        member.name: max(view.memory.since_ns, member.heard_ns, member.well_ns) + int(patience_s * SECOND_NS)
        for member in view.members
        if member.name in view.memory.seats
        and not is_usable(view, member, policy)
        and not is_lost(view, member, policy)
        and not unresponsive_launcher(member)
    }


def unheard_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members with ranks that have not reported to this supervisor yet and are not lost.

    After a takeover, the supervisor waits for them before it decides, because no other process knows which
    snapshots they hold.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.seats and member.report is None and not is_lost(view, member, policy)
    )


def next_timeout_s(view: View, policy: Policy, at_most_s: float) -> float:
    """Return the seconds until the next silent member counts as lost, but at most `at_most_s`."""
    timeouts_s = [timeout_left_s(view, m, policy) for m in view.members]
    return max(0.01, min([at_most_s, *(each for each in timeouts_s if each > 0)]))
