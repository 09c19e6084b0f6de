"""Read the members' reports about the ranks of a group that completes no steps. Pure."""

from __future__ import annotations

from holdfast.protocol.launcher_messages import RankState
from holdfast.protocol.member_messages import RankStall
from supervisor.hangs import evidence
from supervisor.view import reports
from supervisor.view.model import LateRank, View


def stalls(view: View) -> dict[int, RankStall]:
    """Return the stall of each rank that is late."""
    found = (each for report in reports.reports(view) for each in reports.stalls(view, report))
    return {each.rank: each for each in found}


def longest_limit_s(stalled: dict[int, RankStall]) -> float:
    """Return the longest of the limits of these ranks, which early ones have not exceeded yet."""
    return max((each.limit_s for each in stalled.values()), default=0.0)


def reported_after_s(stalled: dict[int, RankStall]) -> float:
    """Return the longest time after which one of these ranks was reported, and its inspections began."""
    return max((each.early_s or each.limit_s for each in stalled.values()), default=0.0)


def early_stalls(view: View) -> dict[int, RankStall]:
    """Return the stalls of the ranks that are within their limits, but in a step that is unusually long."""
    return {rank: each for rank, each in stalls(view).items() if each.early_s}


def phases(view: View) -> dict[int, str]:
    """Return the name of the phase of each live rank of the group; "" if unknown."""
    pages = {each.rank: each.phase for report in reports.reports(view) for each in report.progress}
    gone = {rank.rank for rank in reports.ranks(view) if rank.state == "exited"}
    return {rank: pages.get(rank, "") for rank in range(view.memory.world_size) if rank not in gone}


def pause_label(view: View, rank: int, phase: str) -> str:
    """Return the label of the current pause of `rank`, if its phase is still `phase`; "" otherwise."""
    progress = (each for report in reports.reports(view) for each in report.progress)
    return next((each.label for each in progress if (each.rank, each.phase) == (rank, phase)), "")


def state(view: View, rank: int) -> RankState | None:
    """Return the launcher's report about `rank`; None if there is none."""
    return next((each for each in reports.ranks(view) if each.rank == rank), None)


def are_all_inspected(view: View) -> bool:
    """True if all live ranks were inspected at their current steps."""
    inspected = {
        inspection.rank
        for inspection in reports.all_inspections(view)
        if inspection.step in (reports.step_of_rank(view, inspection.rank), -1)
    }
    return set(phases(view)) <= inspected


def traced_rank(view: View) -> int | None:
    """Return the lowest live rank that has a debugger attached; None if there is none."""
    traced = {
        each.rank for each in reports.all_inspections(view) if evidence.findings(each).role == evidence.TRACED
    }
    alive = phases(view)
    return min((rank for rank in traced if rank in alive), default=None)


def waits_for_others(view: View, rank: int) -> bool:
    """True if an inspection of `rank` at its current step showed that it waits for other ranks."""
    return any(
        inspection.step == reports.step_of_rank(view, rank)
        and evidence.findings(inspection).role == evidence.WAITS
        for inspection in reports.inspections_of_ranks(view).get(rank, ())
    )


def stopped_ranks(view: View) -> frozenset[int]:
    """Return the ranks that are stopped according to both their launchers and the watch, late or not."""
    watched = {each.rank for each in view.watch.ranks if each.role == evidence.STOPPED}
    return frozenset(each.rank for each in reports.ranks(view) if each.stopped and each.rank in watched)


def position(view: View, late: LateRank) -> str:
    """Return the function and line of the script in a rank's newest inspection; "" if there is none."""
    found = reports.inspections_of_ranks(view).get(late.rank, ())
    return (found[0].where or found[0].at) if found else ""


def place(view: View, late: LateRank) -> str:
    """Return `position` without the line number, so that all inspections within one function agree."""
    return evidence.without_line(position(view, late))
