"""Classify members: which ones report, can be controlled, are usable, or may come back. Pure.

A member whose connection is silent is considered lost after `--member-timeout`. On a cluster, three
observations change this time:

- If other members complete steps, the silent member must be taking part in them, so the time starts at the
  last step. If the ranks do not wait for each other, this could hide a lost member forever. A silent member
  is therefore considered lost after `TIMEOUTS` timeouts in any case.
- If the member's host no longer answers, and its ranks hold up the others, the host is considered lost. See
  `_lost_host_in_s`.
- If the group has stopped and a standby is ready, the standby replaces a member whose connection is closed,
  or that does not connect to a new leader as the others do. See `_replaced_in_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from supervisor.identity_cache import by_identity
from supervisor.view.model import SECOND_NS, MemberView, Policy, View

QUIET_S = 1.5  # a member reports every half second, and immediately on request
MUTE_S = 2.5  # a sidecar this silent is replaced, so that a new one can report before the member is lost
# A host is considered lost this long after the last sign of life: a report of its own, or a step of the other
# members, which report the step up to half a second after the power loss. The loss is therefore noticed
# within 5 s.
LOST_HOST_S = 3.0
UNANSWERED_S = 2.0  # two probes in a row, because a single packet can be lost
CLOSED_S = 3.0  # after this time without its sidecar, a member of a stopped group is replaced by a standby
SLOWEST = 2  # see `_connects_in_s`
TIMEOUTS = 10  # a silent member of a group that completes steps is lost after this many timeouts
RENEW_AGAIN_S = 60.0  # if a new sidecar falls silent within this time, replacing it would not help


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

    Such a member may still report, its ranks continue to train, and its snapshots can be read. However, no
    process can stop its ranks or start others.
    """
    return member.report.launcher_silent if member.report is not None else ""


def lacks_launcher_report(member: MemberView) -> bool:
    """True if a member reports and its launcher runs, but the launcher has not reported yet."""
    return is_controllable(member) and member.report is not None and member.report.launcher is None


def is_lost(view: View, member: MemberView, policy: Policy) -> bool:
    """True if a member no longer exists or has been silent for too long."""
    return timeout_left_s(view, member, policy) <= 0


def timeout_left_s(view: View, member: MemberView, policy: Policy) -> float:
    """Return how many more seconds a member can be silent before it is considered lost; 0 if it is gone.

    A new member that has never reported has as much time as the group has to form.
    """
    left_s = _return_left_s(view, member, policy)
    if not left_s or member.name not in view.memory.positions or not _is_silent(member):
        return left_s
    return max(0.0, min(left_s, _replaced_in_s(view, member, policy, _lifeless_s(view, member))))


def _return_left_s(view: View, member: MemberView, policy: Policy) -> float:
    """Return how many more seconds a member has to come back, even if a standby could replace it."""
    if not member.exists:
        return 0.0
    has_ranks = member.name in view.memory.positions
    known = member.report is not None or has_ranks
    limit_s = policy.member_timeout_s if known else policy.form_s
    if not has_ranks or not _is_silent(member):
        return max(0.0, limit_s - member.silent_s)
    lifeless_s = _lifeless_s(view, member)
    left_s = min(limit_s - lifeless_s, TIMEOUTS * limit_s - member.silent_s)
    return max(0.0, min(left_s, _lost_host_in_s(view, member, lifeless_s)))


def has_lost_host(view: View, member: MemberView) -> bool:
    """True if a member that still exists is lost because its host is lost."""
    if not member.exists or member.name not in view.memory.positions or not _is_silent(member):
        return False
    return _lost_host_in_s(view, member, _lifeless_s(view, member)) <= 0


def _is_silent(member: MemberView) -> bool:
    """True if a member has stopped reporting, or has never reported to a new leader."""
    return member.silent_s >= QUIET_S or (
        member.report is None and bool(member.unanswered_s or member.awaited_s)
    )


def _lifeless_s(view: View, member: MemberView) -> float:
    """Return the time since the last sign of life of a silent member: its report, or a step of the group.

    A new leader starts to measure the silence of its members later, to give them time to connect. If a
    member's host does not answer, the member cannot connect, so the time without answers counts as silence.
    """
    silent_s = member.silent_s
    if member.report is None and member.unanswered_s:
        silent_s = max(silent_s, member.unanswered_s)
    stepped_ns = _others(view).stepped_ns
    return min(silent_s, (view.now_ns - stepped_ns) / SECOND_NS) if stepped_ns else silent_s


def _lost_host_in_s(view: View, member: MemberView, lifeless_s: float) -> float:
    """Return in how many seconds a silent member's host is considered lost; infinity without evidence.

    The evidence has three parts, because each part alone can have other causes:

    - The host does not answer. The cause can also be the network between the host and the supervisor.
    - Ranks of a member that reports are late. If only the supervisor could not reach the host, they would be
      on time. This part is not required if there is no step that they could complete.
    - Most members of the group report. If they do not, the supervisor itself may be out of reach.
    """
    if not member.unanswered_s:
        return math.inf
    others = _others(view)
    trains = view.memory.phase == "running" and view.memory.settled
    if 2 * others.reporting < len(view.memory.placement) or (trains and not others.are_late):
        return math.inf
    return max(LOST_HOST_S - lifeless_s, UNANSWERED_S - member.unanswered_s)


def _replaced_in_s(view: View, member: MemberView, policy: Policy, lifeless_s: float) -> float:
    """Return in how many seconds a standby replaces a member without a connection; infinity if none does.

    The kernel closes the connections of processes that are killed. If all processes of a node are killed,
    this is the only sign. If only the sidecar is gone, the kubelet restarts it within 10 s, but a group that
    has stopped can continue sooner without this member. A closed connection is ignored while the group
    trains. It is also ignored while more members must be replaced than standbys are ready, because the group
    could not continue. The member's state is not given up: if the newest state may be only in its memory, the
    group still waits for it (`recoverable_members`).

    A member that has not reported to a new leader may have ended together with the previous leader, or may
    still be connecting. It gets more time than the others needed (`_connects_in_s`).
    """
    if not policy.members_created_externally or view.memory.phase != "securing" or member.connected:
        return math.inf
    others = _others(view)
    if 2 * others.reporting < len(view.memory.placement) or others.unusable > others.standbys:
        return math.inf
    return _connects_in_s(view, member) if member.awaited_s else CLOSED_S - lifeless_s


def _connects_in_s(view: View, member: MemberView) -> float:
    """Return within how many seconds a member should report to a new leader, given when the others reported.

    After the slowest of them has reported, the member gets `SLOWEST` times as long again, and at least
    `CLOSED_S`. A leader of thousands of members needs tens of seconds to accept all of their connections.
    """
    took_s = max(0.0, member.awaited_s - (view.now_ns - _others(view).first_ns) / SECOND_NS)
    return took_s + max(CLOSED_S, SLOWEST * took_s) - member.awaited_s


@dataclass(frozen=True, slots=True)
class _Others:
    """What the reports of members with ranks show about the members that are silent."""

    reporting: int  # how many report
    unusable: int  # how many do not report, are about to end, or cannot be controlled
    stepped_ns: int  # when the supervisor last received a new step from one of them; 0 for never
    first_ns: int  # the latest time at which one of them reported for the first time; 0 for never
    standbys: int  # how many members without ranks could take over ranks now
    are_late: bool  # a rank of a reporting member has made no progress for longer than its steps take


@by_identity(2)
def _others(view: View) -> _Others:
    there = [found for name in view.memory.placement if (found := view.member(name)) is not None]
    reporting = [each for each in there if is_reporting(each)]
    return _Others(
        len(reporting),
        len(view.memory.placement) - sum(is_controllable(m) and m.departure is None for m in reporting),
        max((each.stepped_ns for each in there), default=0),
        max((each.heard_ns for each in there), default=0),
        sum(_can_take_place(view, each) for each in view.members),
        any(
            stall.generation == view.memory.generation and not stall.early_s
            for each in reporting
            if each.report is not None
            for stall in each.report.stalls
        ),
    )


def _can_take_place(view: View, member: MemberView) -> bool:
    memory = view.memory
    is_standby = member.name not in (*memory.positions, *memory.dropped) and member.departure is None
    return is_standby and is_controllable(member) and is_ready(member, view.memory.nproc)


def ready_standbys(view: View) -> int:
    """Return how many members without ranks could take over ranks now."""
    return _others(view).standbys


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
    `--member-timeout` are lost and are not included. A member that is replaced early only because a standby
    is ready is included, because the newest state may be in its memory.
    """
    return {
        member.name: max(view.memory.since_ns, member.heard_ns, member.well_ns) + int(patience_s * SECOND_NS)
        for member in view.members
        if member.name in view.memory.positions
        and not is_usable(view, member, policy)
        and _return_left_s(view, member, policy) > 0
        and not unresponsive_launcher(member)
    }


def unheard_s(member: MemberView) -> float:
    """Return how long the supervisor has waited for a member that has not reported to it.

    On a cluster, the wait begins later, because members need time to find a new supervisor.
    """
    return max(member.silent_s, member.awaited_s)


def unheard_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members with ranks that have not reported to this supervisor yet and are not lost.

    After a takeover, the supervisor waits for them before it decides, because no other process knows which
    snapshots they hold.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.positions
        and member.report is None
        and not is_lost(view, member, policy)
    )


def next_timeout_s(view: View, policy: Policy, at_most_s: float) -> float:
    """Return the seconds until the next silent member is considered lost, but at most `at_most_s`."""
    timeouts_s = [timeout_left_s(view, m, policy) for m in view.members]
    return max(0.01, min([at_most_s, *(each for each in timeouts_s if each > 0)]))
