"""Name the members that, according to the job's state, are cut off from their peers. Pure.

`membership.cut_off_members` finds such a member. From then on, the open incident and the history name this
member and the peers that do not reach it, so a new leader makes the same decisions.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.identity_cache import by_identity
from supervisor.view.model import SECOND_NS, JobState, PastFault

SIGNATURE = "cut off from its peers"  # the signature of the loss of such a member
KEPT = f"{SIGNATURE}, not replaced"  # the same, if no standby was ready when the group started again
MOST_SWAPS = 3  # per hour; if more are needed, swaps do not help
HOUR_S = 3600.0
WARNED = "peers of "  # the beginning of a warning's place
SILENT_S = 5.0  # after a longer gap, the member may not have been running, so its earlier reports are ignored


def named_since(
    before: tuple[tuple[str, int], ...], unreached: tuple[str, ...], heard_ns: int, now_ns: int
) -> tuple[tuple[str, int], ...]:
    """Return the time since which a member's reports have named each unreached neighbour, by URL.

    `before` is the result for the previous report, which arrived at `heard_ns`.
    """
    known = dict(before) if now_ns - heard_ns <= SILENT_S * SECOND_NS else {}
    return tuple((url, known.get(url, now_ns)) for url in unreached)


def unconfirmed(other: str) -> str:
    """Return a clause for a warning: `other` does not confirm that another member cannot reach it."""
    return f"{other} does not confirm this"


def is_asked_to_confirm(memory: JobState, member: str, one: str) -> bool:
    """True if `member` must confirm the report of `one`, which cannot reach it."""
    return any(each.one == one and each.other == member for each in memory.asked)


def is_replaced(memory: JobState, name: str) -> bool:
    """True if a standby takes this member's place because, in the open incident, the member is cut off."""
    return name in _of_incident(memory)


def were_cut_off(memory: JobState) -> frozenset[str]:
    """Return the members that were cut off from their peers and have lost their ranks for that reason."""
    found = frozenset(past.member for past in _all_swaps(memory.history))
    return found - memory.positions.keys()


def unreachable(memory: JobState) -> frozenset[str]:
    """Return the members whose state the others can probably not read."""
    return were_cut_off(memory) | _of_incident(memory)


def suspect(memory: JobState, now_ns: int) -> str:
    """Return the member that may have been at fault when its only unreached peer was replaced; "" for none.

    One pair of members does not show which of the two is at fault. If the member that has kept its ranks and
    the standby do not reach each other either, the fault is with this member. When the group completes a
    step, the member is no longer a suspect (`cleared`).
    """
    recent = _swaps(memory, now_ns)
    stayed = _only_peer(recent[-1]) if recent else ""
    return stayed if stayed in memory.positions else ""


def cleared(history: tuple[PastFault, ...]) -> tuple[PastFault, ...]:
    """Return the history after the group has completed a step, which clears the suspects of earlier swaps."""
    if not any(each.peers for each in _all_swaps(history)):
        return history
    return tuple(replace(each, peers=()) if each.signature == SIGNATURE else each for each in history)


def may_replace(memory: JobState, name: str, now_ns: int) -> bool:
    """True unless too many members that were cut off have been replaced in the last hour.

    Replacing the suspect corrects the previous replacement, so it is always allowed. This correction cannot
    itself be corrected, because the number of replacements would otherwise be unlimited.
    """
    recent = _swaps(memory, now_ns)
    if len(recent) < MOST_SWAPS:
        return True
    was_correction = recent[-1].member == _only_peer(recent[-2])
    return bool(name) and name == suspect(memory, now_ns) and not was_correction


def _swaps(memory: JobState, now_ns: int) -> list[PastFault]:
    since_ns = now_ns - int(HOUR_S * SECOND_NS)
    return [each for each in _all_swaps(memory.history) if each.at_ns > since_ns]


@by_identity(4)  # in a group of thousands of members, each of them gets an order
def _all_swaps(history: tuple[PastFault, ...]) -> tuple[PastFault, ...]:
    return tuple(each for each in history if each.signature == SIGNATURE)


def _only_peer(past: PastFault) -> str:
    return past.peers[0] if len(past.peers) == 1 else ""


def _of_incident(memory: JobState) -> frozenset[str]:
    found = memory.incident.faults if memory.incident is not None else ()
    return frozenset(each.member for each in found if each.signature == SIGNATURE)
