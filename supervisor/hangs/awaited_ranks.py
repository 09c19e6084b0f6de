"""Describe the rank that a group waits for and that is not late itself: where it is, and its limit. Pure."""

from __future__ import annotations

from holdfast.protocol.launcher_messages import RankState
from supervisor.view import reports
from supervisor.view.model import Policy, View

_STARTING = {"joining": "joining the group", "restoring": "restoring its state"}
_PAUSES = {"eval": "an evaluation", "checkpoint": "a checkpoint of its own", "paused": "a pause"}
SNAPSHOT = "snapshot"
PAUSES = frozenset({*_PAUSES, SNAPSHOT})


def describe_in_time(view: View, policy: Policy, rank: int, phase: str) -> str:
    """Return in words what `rank`, which is within its time, does, and which option sets that time."""
    until = f"which may take until --first-step-timeout ({policy.first_step_s:g} s)"
    state = _state(view, rank)
    if phase and state is not None and reports.script_keeps_own_state(view) and not state.marks.first_step_ns:
        return f"rank {rank} has done no optimizer step yet{_at(view, rank)}, {until}"
    if phase in _STARTING:
        return f"rank {rank} is {_STARTING[phase]}{_at(view, rank)}, {until}"
    if not phase or state is None:
        return f"rank {rank} is starting, {until}"
    if not state.marks.first_step_ns:
        return f"rank {rank} is in its first step{_at(view, rank)}, {until}"
    return f"rank {rank} is in {phase} of its own step{_at(view, rank)}, and is not late yet"


def describe_pause(view: View, rank: int, phase: str) -> str:
    """Return in words what `rank` does in a pause whose limit is not over."""
    if phase == SNAPSHOT:
        return f"rank {rank} copies its state for Holdfast"
    until = "the limit of the pause (limit_s, or --pause-timeout)"
    return f"rank {rank} is in {_PAUSES[phase]} that the script declared{_at(view, rank)}, until {until}"


def _at(view: View, rank: int) -> str:
    looks = (look for report in reports.reports(view) for look in reports.looks(view, report))
    place = next((look.where for look in looks if look.rank == rank), "")
    return f", in {place}" if place else ""


def _state(view: View, rank: int) -> RankState | None:
    return next((each for each in reports.ranks(view) if each.rank == rank), None)
