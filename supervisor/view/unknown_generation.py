"""Detect generations that members run but the journal lacks, because a decision was not recorded. Pure."""

from __future__ import annotations

from holdfast.protocol import lineage
from holdfast.protocol.member_messages import KnownHistory
from supervisor.view.model import Fault, View


def newest(view: View) -> int:
    """Return the newest generation that any member runs if the journal does not contain it yet, else 0."""
    launchers = [m.report.launcher for m in view.members if m.exists and m.report is not None]
    found = max((state.generation for state in launchers if state is not None), default=0)
    return found if found > view.memory.generation else 0


def reported_history(view: View) -> KnownHistory | None:
    """Return the run's history as members received it if it is newer than the recorded one, else None.

    Members of an older version, and members whose folder was lost, do not know the history. One thing is then
    certain once the running generation has done a step: it resumed from that step or an earlier one.
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
    """Return the members that report ranks of `generation`, in the order of the ranks.

    A block of ranks that no member reports is assigned to a member that has not reported yet.
    """
    claimed = {
        rank.rank // view.memory.nproc: member.name
        for member in view.members
        if member.exists and member.report is not None and member.report.launcher is not None
        for rank in member.report.launcher.ranks
        if rank.generation == generation
    }
    silent = [m.name for m in view.members if m.exists and m.report is None]
    blocks = range(view.memory.world_size // view.memory.nproc)
    found = [claimed.get(block) or (silent.pop(0) if silent else "") for block in blocks]
    return tuple(name for name in found if name)
