"""What the members run and the journal does not know: a decision whose line was not written. Pure."""

from __future__ import annotations

from holdfast.protocol import lineage
from holdfast.protocol.member_messages import KnownHistory
from supervisor.view.model import Fault, View


def newest(view: View) -> int:
    """Return the newest generation that any member runs, if it is newer than the one that we remember."""
    told = [m.report.launcher for m in view.members if m.exists and m.report is not None]
    found = max((state.generation for state in told if state is not None), default=0)
    return found if found > view.memory.generation else 0


def reported_history(view: View) -> KnownHistory | None:
    """Return what the members were told of the run's history since what we remember; None for nothing newer.

    Members of an older version, and those whose folder is lost, do not know. Then as much is certain: the
    generation that they run began at no later step than the one at which it is, once it has done one.
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
    """The decision that formed the present generation was not written down, and whoever took it is gone."""
    known = view.memory.generation
    detail = f"the members run generation {newest(view)}, and the journal knows only {known}"
    return Fault("lost_track", -1, "", -1, view.now_ns, "lost track", detail)


def unexplained(view: View) -> Fault:
    """The group was stopped, nobody asked for it, and the journal has no fault of its generation."""
    detail = f"the journal does not say why generation {view.memory.generation} was stopped"
    return Fault("lost_track", -1, "", -1, view.now_ns, "lost track", detail)


def claimed_placement(view: View, generation: int) -> tuple[str, ...]:
    """Return which members say that they have the ranks of `generation`, in their order.

    A place that nobody claims is taken to be that of a member that says nothing.
    """
    claimed = {
        rank.rank // view.memory.nproc: member.name
        for member in view.members
        if member.exists and member.report is not None and member.report.launcher is not None
        for rank in member.report.launcher.ranks
        if rank.generation == generation
    }
    quiet = [m.name for m in view.members if m.exists and m.report is None]
    blocks = range(view.memory.world_size // view.memory.nproc)
    found = [claimed.get(block) or (quiet.pop(0) if quiet else "") for block in blocks]
    return tuple(name for name in found if name)
