"""Find the member that is cut off from the others although the supervisor reaches all of them. Pure.

For example, a node's second network or a network policy fails. The ranks then wait for each other, and a
restart in place does not help, because the new ranks cannot form a group either. While its ranks are held up,
each sidecar reports which of its neighbours it cannot reach (`MemberReport.unreached`). If all of these
reports are explained by one member, and a standby is ready, the standby takes its place. The pod of the
replaced member is then evicted, because it is of no use as a standby.
"""

from __future__ import annotations

from supervisor.view import members, reports
from supervisor.view.model import SECOND_NS, Fault, JobState, Policy, View, Warn

SIGNATURE = "cut off from its peers"
STEP_S = 3.0  # a group that has completed a step in this time is not cut off
WARNED = "peers"  # the place of the warning


def due(view: View, policy: Policy) -> Fault | None:
    """Return the loss of the member that is cut off from its peers, if a standby can replace it."""
    pairs = _pairs(view, policy)
    position = _explanation(view, pairs) if pairs else None
    if position is None or not members.ready_standbys(view):
        return None
    return _fault(view, position, pairs)


def warning(view: View, policy: Policy) -> Warn | None:
    """Return a warning about members that cannot reach each other, if no standby helps; once for a run."""
    pairs = _pairs(view, policy)
    if not pairs or WARNED in {each.place for each in view.memory.warned}:
        return None
    one, other = min(pairs)
    names = view.memory.placement
    more = f", nor do {len(pairs) - 1} other pairs" if len(pairs) > 1 else ""
    why = f"members {names[one]} and {names[other]} do not reach each other{more}"
    need = "no standby is ready" if not members.ready_standbys(view) else "no single member explains this"
    return Warn(
        WARNED, f"{why}, so the group completes no step. Check the network between their nodes: {need}"
    )


def is_replaced(view: View, name: str) -> bool:
    """True if the open incident is that this member is cut off, so that a standby takes its place."""
    incident = view.memory.incident
    return incident is not None and any(
        fault.member == name and fault.signature == SIGNATURE for fault in incident.faults
    )


def were_cut_off(memory: JobState) -> frozenset[str]:
    """Return the members that were cut off from their peers and have lost their ranks for that reason."""
    found = frozenset(past.member for past in memory.history if past.signature == SIGNATURE)
    return found - memory.seats.keys()


def _pairs(view: View, policy: Policy) -> frozenset[tuple[int, int]]:
    """Return the pairs of positions of members that do not reach each other, but reach the supervisor."""
    memory = view.memory
    if not policy.members_created_externally or len(memory.placement) < 2:
        return frozenset()
    there = [view.member(name) for name in memory.placement]
    reporting = [each is not None and members.is_controllable(each) for each in there]
    if not any(each.report.unreached for each in there if each is not None and each.report is not None):
        return frozenset()
    stepped_ns = max((each.stepped_ns for each in there if each is not None), default=0)
    if view.now_ns - stepped_ns < STEP_S * SECOND_NS:
        return frozenset()
    positions = {each.url: each.rank // memory.nproc for each in memory.peers if each.url}
    found: set[tuple[int, int]] = set()
    for position, each in enumerate(there):
        if each is None or each.report is None or not reporting[position]:
            continue
        for other in (positions.get(url) for url in each.report.unreached):
            if other is not None and other != position and 0 <= other < len(there) and reporting[other]:
                found.add((min(position, other), max(position, other)))
    return frozenset(found)


def _explanation(view: View, pairs: frozenset[tuple[int, int]]) -> int | None:
    """Return the position that is in all pairs; None if there is none.

    If two members do not reach each other and nothing else is known, it is the one that has not just replaced
    a member for the same reason, or else the one without rank 0.
    """
    common = set(min(pairs)).intersection(*pairs)
    if len(common) < 2:
        return next(iter(common), None)
    last = view.memory.history[-1] if view.memory.history else None
    if last is not None and last.signature == SIGNATURE and not view.memory.settled:
        common.discard(last.rank // view.memory.nproc)
    return max(common)


def _fault(view: View, position: int, pairs: frozenset[tuple[int, int]]) -> Fault:
    memory = view.memory
    name, first = memory.placement[position], position * memory.nproc
    listed = ", ".join(str(rank) for rank in range(first, first + memory.nproc))
    others = [memory.placement[sum(pair) - position] for pair in sorted(pairs)]
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return Fault(
        "member_lost",
        first,
        name,
        reports.furthest_step(view),
        view.now_ns,
        SIGNATURE,
        f"member {name} with {'rank' if memory.nproc == 1 else 'ranks'} {listed} is cut off:"
        f" it and {shown} do not reach each other",
    )
