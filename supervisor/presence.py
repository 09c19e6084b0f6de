"""Who is there: which members speak, which may come back, which cannot do what they are told. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.view import MemberView, Policy, View

QUIET_S = 1.5  # a member reports every half second, and at once when it is asked for its state
MUTE_S = 2.5  # so that another sidecar can speak before a member counts as lost
AGAIN_S = 60.0  # a sidecar that is mute again so soon after another took its place is not what is wrong


def speaks(member: MemberView) -> bool:
    """True when what a member has told is what it still is, as far as anybody can know."""
    return member.exists and member.connected and member.silent_s < QUIET_S


def mute(view: View, renewed_ns: Mapping[str, int]) -> tuple[str, ...]:
    """Return the members whose sidecars should be looked at and replaced: none of their reports comes.

    `renewed_ns` has when that was last asked for each.
    """
    return tuple(
        member.name
        for member in view.members
        if member.exists and member.report is not None and member.silent_s > MUTE_S
        if member.name not in renewed_ns or view.now_ns - renewed_ns[member.name] > AGAIN_S * 1e9
    )


def obeys(member: MemberView) -> bool:
    """True when a member that speaks can also end and start ranks."""
    return speaks(member) and not deaf(member)


def deaf(member: MemberView) -> str:
    """Return why a member cannot obey though it may speak, "" when it can: its launcher does not answer.

    Its ranks train on, and what they left in its memory can be read, but nobody can stop them or make others.
    """
    return member.report.launcher_silent if member.report is not None else ""


def unheard(member: MemberView) -> bool:
    """True when a member speaks whose sidecar has not heard what its launcher, which is there, has to say."""
    return obeys(member) and member.report is not None and member.report.launcher is None


def is_lost(view: View, member: MemberView, policy: Policy) -> bool:
    """True when a member cannot come back as it was: gone, or silent for too long."""
    return silence_left_s(view, member, policy) <= 0


def silence_left_s(view: View, member: MemberView, policy: Policy) -> float:
    """Return for how much longer a member may say nothing before it counts as lost; 0 when it is gone.

    One that is new, and was never heard of, has as long as the group may take to form.
    """
    if not member.exists:
        return 0.0
    known = member.report is not None or member.name in view.memory.placement
    limit_s = policy.member_timeout_s if known else policy.form_s
    return max(0.0, limit_s - member.silent_s)
