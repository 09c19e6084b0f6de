"""Detect a generation that members run but that is not in the journal, because a decision was not recorded.

Pure.
"""

from __future__ import annotations

from holdfast.protocol import lineage
from holdfast.protocol.member_messages import KnownHistory
from supervisor.view.model import Fault, View


def newest(view: View) -> int:
    """Return the newest generation that any member runs; 0 if the journal already contains it."""
    launchers = [m.report.launcher for m in view.members if m.exists and m.report is not None]
    found = max((state.generation for state in launchers if state is not None), default=0)
    return found if found > view.memory.generation else 0


def reported_history(view: View) -> KnownHistory | None:
    """Return the run's history as members received it; None if the journal has the same or a newer one.

    Members of an older version do not know the history, and neither do members that have lost their folder.
    If no member knows it, the history is derived from a step that the running generation has completed: the
    generation resumed from that step or an earlier one. If it has completed no step, the result is None.
    """
    reports = [m.report for m in view.members if m.exists and m.report is not None]
    found = max((each.told for each in reports), key=lambda each: each.generation, default=KnownHistory())
    if found.generation > view.memory.generation and found.lineage:
        return found
    running = newest(view)
    begun = [
        progress.step
        for report in reports
        if report.launcher is not None and report.launcher.generation == running
        for rank in report.launcher.ranks
        for progress in report.progress
        if rank.marks.first_step_ns and progress.rank == rank.rank
    ]
    if not running or not begun:
        return None
    return KnownHistory(running, lineage.extended(view.memory.lineage, running, max(begun)))


def fault(view: View) -> Fault:
    """Return the fault of a running generation whose start was not recorded."""
    known = view.memory.generation
    detail = f"the members run generation {newest(view)}, but the journal ends with generation {known}"
    return Fault("lost_track", -1, "", -1, view.now_ns, "lost track", detail)


def unexplained(view: View) -> Fault:
    """Return the fault of a group that was stopped without a request and without a recorded fault."""
    detail = f"the journal does not contain the reason why generation {view.memory.generation} was stopped"
    return Fault("lost_track", -1, "", -1, view.now_ns, "lost track", detail)


def claimed_placement(view: View, generation: int) -> tuple[str, ...]:
    """Return the members that report ranks of `generation`, in the order of their ranks.

    A position whose ranks no member reports is assigned to a member that has not reported yet.
    """
    claimed = {
        rank.rank // view.memory.nproc: member.name
        for member in view.members
        if member.exists and member.report is not None and member.report.launcher is not None
        for rank in member.report.launcher.ranks
        if rank.generation == generation
    }
    silent = [m.name for m in view.members if m.exists and m.report is None]
    positions = range(view.memory.world_size // view.memory.nproc)
    found = [claimed.get(position) or (silent.pop(0) if silent else "") for position in positions]
    return tuple(name for name in found if name)
