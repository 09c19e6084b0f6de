"""Move the ranks of members that are about to end to standbys. Pure.

A departure is not a fault: the group stops between two steps while all of its members still hold their
states, so it repeats no completed step. Without a standby, the group is not interrupted.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.decision import resume_point
from supervisor.decision.membership import placement
from supervisor.fault_kinds import kind_of
from supervisor.view import interrupted_work, members, reports
from supervisor.view.model import SECOND_NS, Fault, MemberView, Policy, View, Wait

# A swap waits for work outside of a step (an evaluation, a save, a pause), but only until this long before
# the member ends. The swap takes about a second, and the launcher of a pod kills its ranks 5 s before the
# kubelet would.
LAST_S = 12.0
HEARD_S = 5.0  # after a takeover, members have this long to report before an ending member is considered lost


def due(view: View, policy: Policy) -> tuple[Fault, ...]:
    """Return the departures of members that standbys can replace now.

    Returns () if there are none, or if the group must not stop now. The group stops only after it has
    completed a step, because the swap would otherwise interrupt its start. Work outside of a step is not
    interrupted unless the member may end before this work does. A group that holds no state, and could
    therefore not resume, is never stopped.
    """
    if not view.memory.settled:
        return ()
    found = placement.departing_members(view, policy)
    if not found or not resume_point.holds_state(view):
        return ()
    if not _is_urgent(view, found) and interrupted_work.find(view, ()):
        return ()
    return tuple(_fault(view, name) for name in found)


def _is_urgent(view: View, names: tuple[str, ...]) -> bool:
    departures = (member.departure for name in names if (member := view.member(name)) is not None)
    ends_ns = min((each.ends_ns for each in departures if each is not None and each.ends_ns), default=0)
    return bool(ends_ns) and view.now_ns >= ends_ns - int(LAST_S * SECOND_NS)


def _fault(view: View, name: str) -> Fault:
    member = view.member(name)
    assert member is not None
    assert member.departure is not None
    nproc = view.memory.nproc
    ranks = range(view.memory.positions[name] * nproc, (view.memory.positions[name] + 1) * nproc)
    listed = f"{'rank' if nproc == 1 else 'ranks'} {', '.join(map(str, ranks))}"
    return Fault(
        "departure",
        ranks[0],
        name,
        reports.furthest_step(view),
        view.now_ns,
        f"departure of {name}",
        f"member {name} with {listed} is about to end: {member.departure.why}",
    )


def without_ended(view: View, policy: Policy) -> View:
    """Return `view` without the members that were asked to end and are no longer needed.

    A member that was asked to end still trains and holds its state. If a standby can take over the ranks of a
    departing member, the member is needed until the group has completed a step on the standby. If the group
    has stopped or has just started, the member is also needed for as long as only it holds the newest state.
    """
    if not any(m.exists and _has_begun(m) for m in view.members):
        return view
    replaced = placement.departing_members(view, policy)
    kept = frozenset(m.name for m in view.members if _has_begun(m) and _is_needed(view, m, replaced))
    found = tuple(
        replace(m, exists=False) if m.exists and _has_begun(m) and m.name not in kept else m
        for m in view.members
    )
    return replace(view, members=found)


def _has_begun(member: MemberView) -> bool:
    return member.departure is not None and member.departure.has_begun


def _is_needed(view: View, member: MemberView, replaced: tuple[str, ...]) -> bool:
    memory = view.memory
    if memory.phase not in ("running", "securing"):
        return False
    if memory.phase == "running" and not memory.settled:
        return True
    if member.name not in memory.positions:
        return memory.phase == "securing"
    if replaced or unheard(view):  # swap the others first, because all members hold their states now
        return True
    if memory.phase == "running" and len(memory.placement) == 1:
        return True  # no other member has the state, which would only be lost sooner
    return memory.phase == "securing" and _may_hold_newest_state(view, member)


def _may_hold_newest_state(view: View, member: MemberView) -> bool:
    """True if only this member holds the newest state, or if it has not reported yet what it holds."""
    if member.report is None or not members.is_reporting(member):
        return False
    if member.report.secured_for < view.memory.generation:
        return True
    without = replace(view, members=tuple(each for each in view.members if each is not member))
    return resume_point.newest(without, None).step < resume_point.newest(view, None).step


def unheard(view: View) -> tuple[str, ...]:
    """Return the existing members that have had little time to report to this supervisor.

    After a takeover, they include standbys that are ready to take the ranks of a member.
    """
    return tuple(
        m.name for m in view.members if m.exists and m.report is None and members.unheard_s(m) < HEARD_S
    )


def await_standbys(view: View, policy: Policy, cause: Fault) -> Wait | None:
    """Return a `Wait` if the group has stopped for a swap, or to grow, and a standby has yet to report."""
    waiting = unheard(view)
    if not kind_of(cause.kind).is_planned or not waiting:
        return None
    chosen = frozenset(placement.choose_members(view, policy))
    grows = cause.kind == "growth" and len(chosen) < policy.members
    if not grows and not any(m.departure is not None and m.name in chosen for m in view.members):
        return None
    least_s = min(members.unheard_s(m) for m in view.members if m.name in waiting)
    until_ns = view.now_ns + int((HEARD_S - least_s) * SECOND_NS) + 1
    return Wait(until_ns, f"waiting for the report of {', '.join(waiting)}")
