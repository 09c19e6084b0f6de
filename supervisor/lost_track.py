"""What the members run and the journal does not know: a decision whose line was not written. Pure."""

from __future__ import annotations

from supervisor.view import Fault, View


def ahead(view: View) -> int:
    """Return the newest generation that any member runs, if it is newer than the one that we remember."""
    told = [m.report.launcher for m in view.members if m.exists and m.report is not None]
    newest = max((state.generation for state in told if state is not None), default=0)
    return newest if newest > view.memory.generation else 0


def fault(view: View) -> Fault:
    """The decision that formed the present generation was not written down, and whoever took it is gone."""
    known = view.memory.generation
    detail = f"the members run generation {ahead(view)}, and the journal knows only {known}"
    return Fault("lost_track", -1, "", -1, view.now_ns, "lost track", detail)


def unexplained(view: View) -> Fault:
    """The group was stopped, nobody asked for it, and the journal has no fault of its generation."""
    detail = f"the journal does not say why generation {view.memory.generation} was stopped"
    return Fault("lost_track", -1, "", -1, view.now_ns, "lost track", detail)


def seats(view: View, generation: int) -> tuple[str, ...]:
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
