"""Name the members that, according to the job's state, are cut off from their peers. Pure.

`places.cut_off_members` finds such a member. From then on, the open incident and the history name it, so a
new leader knows it too.
"""

from __future__ import annotations

from supervisor.view.model import JobState

SIGNATURE = "cut off from its peers"  # of the loss of such a member


def is_replaced(memory: JobState, name: str) -> bool:
    """True if the open incident is that this member is cut off, so that a standby takes its place."""
    return name in _of_incident(memory)


def were_cut_off(memory: JobState) -> frozenset[str]:
    """Return the members that were cut off from their peers and have lost their ranks for that reason."""
    found = frozenset(past.member for past in memory.history if past.signature == SIGNATURE)
    return found - memory.seats.keys()


def unreachable(memory: JobState) -> frozenset[str]:
    """Return the members whose state the others can probably not read."""
    return were_cut_off(memory) | _of_incident(memory)


def _of_incident(memory: JobState) -> frozenset[str]:
    found = memory.incident.faults if memory.incident is not None else ()
    return frozenset(each.member for each in found if each.signature == SIGNATURE)
