"""Find a member that the other members cannot reach although the supervisor reaches all of them. Pure.

This happens, for example, if a node's second network fails or a network policy blocks connections. The ranks
then wait for each other, and a restart in place does not help, because the new ranks cannot form a group
either. While its ranks are held up, each sidecar reports which of its neighbours it no longer reaches
(`MemberReport.unreached`). A pair of members is considered only if both have reported each other for a while.
If a single member is in all pairs and a standby is ready, the standby takes that member's place. If there is
only one pair, two members are in all pairs, and one of them is replaced. If the remaining member and the
standby do not reach each other either, the remaining member is replaced next, regardless of the number of
earlier replacements. The pod of the replaced member is evicted when the group trains again. No ranks are
moved because of a report that the other member does not confirm. After a while, the supervisor warns the user
about such a report, and the report no longer prevents it from acting on confirmed pairs. It then
also asks the other one to confirm the report, until the group completes a step (`with_unconfirmed_reports`).

Some ranks fail at once if they cannot connect. Repeated restarts in place would then end the run before any
sidecar has probed its neighbours. If ranks lose their peers a second time without a step in between, the
group is therefore not restarted until the sidecars have had time to report (`held_until_ns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from supervisor.decision import unreachable_members
from supervisor.decision.membership import joining
from supervisor.decision.unreachable_members import MOST_SWAPS, SIGNATURE, WARNED
from supervisor.hangs import group_reports
from supervisor.view import faults, members, reports
from supervisor.view.model import (
    SECOND_NS,
    Fault,
    JobState,
    MemberView,
    Policy,
    UnconfirmedReport,
    View,
    Wait,
    Warn,
)

# How long both members of a pair must have been unable to reach each other. Sidecars probe once a second, so
# by then all other affected members have reported too.
CONFIRM_S = 6.0
# How long this must be the case before the first step of a generation. Ranks that load or compile do not need
# the network, so a short network failure does not delay them.
FIRST_STEP_S = 30.0
UNCONFIRMED_S = 40.0  # how long an unconfirmed report prevents this rule from acting
MOST_UNCONFIRMED_S = 120.0  # how long it does so if the other member's connection breaks again and again
STEP_S = 3.0  # if the group has completed a step within this time, no member is cut off
# If the ranks of a group have lost their peers again, the group waits for reports until this long after its
# start. Sidecars begin to probe after 5 s, three attempts take up to 7 s, and the reports must then last for
# `CONFIRM_S`.
EVIDENCE_S = 20.0
# How long the group waits if a member reports another, which must confirm this after `UNCONFIRMED_S`.
DOUBT_S = UNCONFIRMED_S + 2 * EVIDENCE_S
# How long the group waits while members report that they do not reach each other and no standby is ready.
HELD_S = 600.0
STANDBY_S = 10.0  # how long a group that has stopped for a swap waits for a disconnected standby
MOST_WARNINGS = 4  # per run


def due(view: View, policy: Policy) -> Fault | None:
    """Return the loss of the member that is cut off from its peers, if the group can continue without it.

    A standby must be ready to replace it, unless it has just made the group larger.
    """
    pairs, unconfirmed = _pairs(view, policy)
    position = _explanation(view, pairs, unconfirmed)
    if position is None or not _may_replace(view, position):
        return None
    can_leave = view.memory.placement[position] in joining.on_trial(view, policy)
    if not can_leave and not members.ready_standbys(view):
        return None
    return _fault(view, position, pairs)


def held_until_ns(view: View, policy: Policy) -> int:
    """Return the time before which a group whose ranks have failed is not restarted; 0 for a restart at once.

    The group waits if the only failure is that its ranks have lost their peers, for the second time without a
    step in between. It also waits while members report that they do not reach each other.
    """
    memory = view.memory
    if memory.settled or memory.stop or not has_lost_peers(view, policy) or joining.on_trial(view, policy):
        return 0
    there = [view.member(name) for name in memory.placement]
    if not all(each is not None and _is_up_to_date(view, each) for each in there):
        return 0
    last, step = memory.history[-1:], faults.root_cause(faults.find_faults(view, policy)).step
    is_repeated = bool(last) and last[0].kind == "victim" and step <= last[0].step
    is_reported = any(each.report.unreached for each in there if each and each.report)
    if not is_repeated and not is_reported:
        return 0
    pairs, _ = _pairs(view, policy)
    limit_s = HELD_S if pairs else DOUBT_S if is_reported else EVIDENCE_S
    until_ns = memory.since_ns + int(limit_s * SECOND_NS)
    return until_ns if view.now_ns < until_ns else 0


def with_unconfirmed_reports(view: View, policy: Policy) -> JobState:
    """Return `view.memory` with the reports that members must confirm; the same object if they are the same.

    A request outlives a restart of the group, because the report must then last for a while again. It ends
    when the group completes a step, or when one of its members has lost its ranks. It does not depend on
    warnings, because their number is limited.
    """
    memory = view.memory
    if not policy.members_created_externally or memory.phase != "running":
        return memory
    is_reported = any(each.report.unreached for each in view.members if each.report is not None)
    if not memory.asked and not is_reported:
        return memory
    step, names = reports.furthest_step(view), memory.placement
    kept = tuple(
        each
        for each in memory.asked
        if {each.one, each.other} <= memory.positions.keys()
        and not (each.generation == memory.generation and 0 <= each.step < step)
    )
    known = {(each.one, each.other) for each in kept}
    _, unconfirmed = _pairs(view, policy) if is_reported else _NONE
    new = (
        UnconfirmedReport(names[one], names[other], memory.generation, step)
        for one, other in sorted(unconfirmed)
        if (names[one], names[other]) not in known
    )
    asked = (*kept, *new)
    return memory if asked == memory.asked else replace(memory, asked=asked)


def await_standby(view: View, chosen: Sequence[str]) -> Wait | None:
    """Return a `Wait` if a member that is cut off would be `chosen` again, because no standby is ready now.

    A standby was ready when the group stopped, and a restart in place would not help.
    """
    kept = [name for name in chosen if unreachable_members.is_replaced(view.memory, name)]
    until_ns = view.memory.since_ns + int(STANDBY_S * SECOND_NS)
    if not kept or view.now_ns >= until_ns:
        return None
    return Wait(until_ns, f"waiting for a standby to take the place of {kept[0]}")


def has_lost_peers(view: View, policy: Policy) -> bool:
    """True if ranks of a group on a cluster have failed, and all because they lost their peers."""
    if not policy.members_created_externally:
        return False
    found = faults.find_faults(view, policy)
    return bool(found) and all(each.kind == "victim" for each in found)


def warning(view: View, policy: Policy) -> Warn | None:
    """Return a warning about members that do not reach each other, if no standby helps; once per cause."""
    pairs, unconfirmed = _pairs(view, policy)
    if not pairs and not unconfirmed:
        return None
    one, other = min(pairs or unconfirmed)
    names, position = view.memory.placement, _explanation(view, pairs, unconfirmed)
    if not pairs:
        why = f"member {names[one]} does not reach {names[other]}"
        need = unreachable_members.unconfirmed(names[other])
    else:
        more = f", nor do {len(pairs) - 1} other pairs" if len(pairs) > 1 else ""
        why = f"members {names[one]} and {names[other]} do not reach each other{more}"
        need = "no single member explains this" if position is None else "no standby is ready"
    if not _may_replace(view, position):
        need = f"{MOST_SWAPS} replacements within an hour have not helped"
    place = f"{WARNED}{names[one]}: {need}"
    known = [each.place for each in view.memory.warned if each.place.startswith(WARNED)]
    if place in known or len(known) >= MOST_WARNINGS:
        return None
    return Warn(
        place, f"{why}, so the group completes no step. Check the network between their nodes: {need}"
    )


def _may_replace(view: View, position: int | None) -> bool:
    name = view.memory.placement[position] if position is not None else ""
    return unreachable_members.may_replace(view.memory, name, view.now_ns)


_Pairs: TypeAlias = "frozenset[tuple[int, int]]"
_NONE: tuple[_Pairs, _Pairs] = (frozenset(), frozenset())


def _pairs(view: View, policy: Policy) -> tuple[_Pairs, _Pairs]:
    """Return the pairs of positions of members that do not reach each other, but reach the supervisor.

    The second set contains the pairs that only one of the two members reports. Both sets are empty while a
    report is recent, because more reports may arrive within seconds. They are also empty while the others may
    be waiting for a rank in a declared pause, because a pause is not interrupted.
    """
    memory = view.memory
    if not policy.members_created_externally or len(memory.placement) < 2:
        return _NONE
    there = [view.member(name) for name in memory.placement]
    if not any(each.report.unreached for each in there if each is not None and each.report is not None):
        return _NONE
    if not all(each is not None and _is_up_to_date(view, each) for each in there):
        return _NONE
    stepped_ns = max((each.stepped_ns for each in there if each is not None), default=0)
    if view.now_ns - stepped_ns < STEP_S * SECOND_NS:
        return _NONE
    if _is_declared(view):
        return _NONE
    confirm_s = CONFIRM_S if memory.settled or has_lost_peers(view, policy) else FIRST_STEP_S
    positions = {each.url: each.rank // memory.nproc for each in memory.peers if each.url}
    missed: dict[tuple[int, int], float] = {}
    for position, each in enumerate(there):
        assert each is not None
        assert each.report is not None
        others = {positions.get(url, position) for url in each.report.unreached} - {position}
        lasted = {positions.get(url, position): _lasted_s(view, each, url) for url in each.report.unreached}
        missed |= {(position, other): lasted[other] for other in others if 0 <= other < len(there)}
    unconfirmed = frozenset((one, other) for one, other in missed if (other, one) not in missed)
    lasted_s = {
        pair: min(since_s, _could_confirm_s(view, there[pair[1]], since_s))
        if pair in unconfirmed
        else since_s
        for pair, since_s in missed.items()
    }
    if any(each < (UNCONFIRMED_S if pair in unconfirmed else confirm_s) for pair, each in lasted_s.items()):
        return _NONE
    silent = {position for position in range(len(there)) if _cannot_confirm(position, there, missed)}
    unconfirmed = frozenset(pair for pair in unconfirmed if pair[1] not in silent)
    confirmed = (pair for pair in missed if pair not in unconfirmed)
    return frozenset((min(pair), max(pair)) for pair in confirmed), unconfirmed


def _lasted_s(view: View, member: MemberView, url: str) -> float:
    """Return how long a member has been unable to reach the neighbour at `url`.

    The sidecar reports this number. It is ignored, however, if it does not grow although the member has named
    this neighbour in all reports for long enough.
    """
    assert member.report is not None
    named_ns = max(dict(member.unreached_ns).get(url, view.now_ns), member.stepped_ns, view.memory.since_ns)
    named_s = (view.now_ns - named_ns) / SECOND_NS
    return max(member.report.unreached_s, named_s if named_s >= UNCONFIRMED_S else 0.0)


def _cannot_confirm(
    position: int, there: Sequence[MemberView | None], missed: Mapping[tuple[int, int], float]
) -> bool:
    """True if both of a member's neighbours report it, but it reports neither, and its sidecar may be new.

    A new sidecar does not know which neighbours its predecessor has reached.
    """
    member, beside = there[position], {(position + step) % len(there) for step in (-1, 1)}
    if member is None or len(beside) < 2 or not all((each, position) in missed for each in beside):
        return False
    stepped_ns = max(each.stepped_ns for each in there if each is not None)
    is_new = max(member.heard_ns, member.back_ns) > stepped_ns
    return is_new and not any(one == position for one, _ in missed)


def _is_declared(view: View) -> bool:
    """True if a live rank is in a pause that the script declared, or under a debugger. Others wait for it."""
    if group_reports.traced_rank(view) is not None:
        return True
    alive = {each.rank for each in reports.ranks(view) if each.ending is None and each.state != "exited"}
    told = (each for report in reports.reports(view) for each in report.progress)
    return any(each.pause_left_s > 0 and each.rank in alive for each in told)


def _could_confirm_s(view: View, member: MemberView | None, since_s: float) -> float:
    """Return how long a member has had to confirm a report that has lasted for `since_s`.

    The member may have had less time because its connection or its sidecar is new. If that happens again and
    again, the supervisor stops waiting for the confirmation.
    """
    if member is None or since_s >= MOST_UNCONFIRMED_S:
        return since_s
    return (view.now_ns - max(member.heard_ns, member.back_ns)) / SECOND_NS


def _is_up_to_date(view: View, member: MemberView) -> bool:
    """True if a member's report is about the ranks of this generation."""
    launcher = member.report.launcher if member.report is not None else None
    is_current = launcher is not None and launcher.generation == view.memory.generation
    return is_current and members.is_controllable(member)


def _explanation(view: View, pairs: _Pairs, unconfirmed: _Pairs) -> int | None:
    """Return the position that is in all pairs; None if there is none.

    If two positions are in all pairs, return that of the member in more unconfirmed pairs, because a
    confirmation may be missing for a known reason. If both members are in equally many, return that of the
    member that was already in such a pair with the other member's predecessor. Failing that, return that of
    the member that is new in the group, or else that of the member without rank 0.
    """
    if not pairs:
        return None
    found = set(min(pairs)).intersection(*pairs)
    counts = {each: sum(each in pair for pair in unconfirmed) for each in found}
    found = {each for each in found if counts[each] == max(counts.values())}
    suspect = view.memory.positions.get(unreachable_members.suspect(view.memory, view.now_ns))
    if suspect in found:
        return suspect
    names, untried = view.memory.placement, view.memory.untried
    return max(found, key=lambda each: (names[each] in untried, each), default=None)


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
        peers=tuple(others),
    )
