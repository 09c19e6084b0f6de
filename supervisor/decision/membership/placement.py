"""Choose the members that the ranks of the next generation run on. Pure."""

from __future__ import annotations

import math

from supervisor.decision import unreachable_members
from supervisor.decision.membership import joining
from supervisor.view import members
from supervisor.view.model import MemberView, Policy, View


def choose_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members for the next generation; fewer than requested if not enough are usable.

    A member with ranks keeps them. A standby that is ready replaces a member that cannot be used or whose
    ranks keep failing. If more standbys are ready than are needed for that, they also replace members that
    are about to end. A member that is about to end gets no ranks in addition to its own, unless its node is
    only suspected to be faulty and there is no other member. If the group is smaller than requested and has
    trained for long enough, the remaining standbys are appended to it. If such a standby fails before the
    group's first step, it is left out again.

    Standbys that were cut off from their peers, or that failed when they joined, are chosen last.
    """
    return tuple(name for _, name in _choose(view, policy))


def kept_positions(view: View, policy: Policy) -> tuple[int, ...]:
    """Return, for each chosen member, the position in the current placement that it keeps or takes over.

    It is -1 for a member that makes the group larger. For the first group, it is the member's own position.
    """
    return tuple(position for position, _ in _choose(view, policy))


def _choose(view: View, policy: Policy) -> tuple[tuple[int, str], ...]:
    """Return the chosen members with their positions; see `kept_positions`."""
    memory, failed, barred = view.memory, joining.failed(view, policy), joining.barred(view)
    usable = {m.name: m for m in view.members if members.is_usable(view, m, policy)}
    ready = [
        m
        for name, m in usable.items()
        if name not in memory.positions
        and name not in barred
        and (m.departure is None or m.departure.may_stay)
        and members.is_ready(m, memory.nproc)
    ]
    doubtful = unreachable_members.were_cut_off(memory).union(memory.dropped)
    ready.sort(key=lambda m: (m.departure is not None, m.name in doubtful))
    standbys = [m.name for m in ready]
    if not memory.placement:
        return tuple(enumerate(standbys[: policy.members]))
    away = _replaced_early(view, usable, sum(m.departure is None for m in ready))
    chosen: list[tuple[int, str]] = []
    for position, name in enumerate(memory.placement):
        if name in failed:
            continue
        if name in usable and name not in away and not (standbys and _is_unfit(view, name)):
            chosen.append((position, name))
        elif standbys:
            chosen.append((position, standbys.pop(0)))
    able = [name for name in standbys if usable[name].departure is None]
    added = able[: max(0, policy.members - len(chosen))] if joining.may_grow(view) and not failed else []
    return (*chosen, *((-1, name) for name in added))


def departing_members(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members with ranks that are about to end and that ready standbys can replace now."""
    if all(m.departure is None for m in view.members):
        return ()
    chosen = choose_members(view, policy)
    if len(chosen) < (len(view.memory.placement) if view.memory.reduced_by else policy.members):
        return ()
    found = (view.member(name) for name in view.memory.placement if name not in chosen)
    return tuple(m.name for m in found if m is not None and m.departure is not None)


def _replaced_early(view: View, usable: dict[str, MemberView], standbys: int) -> frozenset[str]:
    """Return the usable members that standbys replace because they are about to end, soonest first.

    Members that cannot be used or are unfit take precedence, because the group cannot run without replacing
    them.
    """
    placement = view.memory.placement
    departing = [
        m
        for name in placement
        if (m := usable.get(name)) is not None and m.departure is not None and not _is_unfit(view, name)
    ]
    if not departing:
        return frozenset()
    needed = sum(name not in usable or _is_unfit(view, name) for name in placement)
    departing.sort(key=lambda m: (m.departure is not None and m.departure.ends_ns) or math.inf)
    return frozenset(m.name for m in departing[: max(0, standbys - needed)])


def _is_unfit(view: View, name: str) -> bool:
    """True if a usable member should lose its ranks, provided that a standby can take them."""
    return _keeps_failing(view, name) or unreachable_members.is_replaced(view.memory, name)


def _keeps_failing(view: View, name: str) -> bool:
    """True if this member's ranks crashed twice in a row, and the group completed no step in between."""
    memory = view.memory
    cause = memory.incident.faults[0] if memory.incident and memory.incident.faults else None
    last = memory.history[-1] if memory.history else None
    if cause is None or last is None or cause.kind != "crash" or last.kind != "crash":
        return False
    return cause.member == last.member == name and cause.step <= last.step
