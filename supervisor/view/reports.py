"""Read from a view what the members report of the present generation. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import RankInspection, RankState
from holdfast.protocol.member_messages import MemberReport, RankProgress, RankStall
from supervisor.view import members, unknown_generation
from supervisor.view.model import View
from supervisor.wording import step_in_words


def inspections(view: View, report: MemberReport) -> tuple[RankInspection, ...]:
    """Return the newest inspections of the member's ranks, if they are of the present generation."""
    return report.looks if report.looked_for == view.memory.generation else ()


def members_without_rank_report(view: View) -> tuple[str, ...]:
    """Return the members with ranks of which the supervisor, or the sidecar, just started, knows nothing yet.

    Members that are lost or whose launcher does not answer are not included: those are faults of their own.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.placement
        and (member.report is None or member.report.launcher is None)
        and not members.unresponsive_launcher(member)
    )


def progress(view: View, report: MemberReport) -> tuple[RankProgress, ...]:
    """Return the progress of the member's ranks if its launcher runs the present generation."""
    launcher = report.launcher
    return report.progress if launcher is not None and launcher.generation == view.memory.generation else ()


def stalls(view: View, report: MemberReport) -> tuple[RankStall, ...]:
    """Return the stalls of the present generation, without those of ranks that have done a step since."""
    return tuple(
        stall
        for stall in report.stalls
        if stall.generation == view.memory.generation and step_of(report, stall.rank) <= stall.step
    )


def step_of(report: MemberReport, rank: int) -> int:
    """Return the steps that a rank has done according to `report`; -1 if the report does not contain it."""
    return next((each.step for each in report.progress if each.rank == rank), -1)


def is_unwinding(report: MemberReport, rank: RankState) -> bool:
    """True while an exception may be about to end a rank: its `finally` blocks run, and no step has ended."""
    hint = rank.ending
    if hint is None or not hint.unwinding or rank.state == "exited":
        return False
    return not 0 <= hint.step < step_of(report, rank.rank)


def pause_left_s(report: MemberReport, rank: int) -> float:
    """Return how much of its limit is left to the pause that a rank is in; 0 outside of a pause."""
    return next((each.pause_left_s for each in report.progress if each.rank == rank), 0.0)


def step_of_rank(view: View, rank: int) -> int:
    """Return the steps that a rank of the present generation has done; -1 if that is not known."""
    return max((step_of(report, rank) for report in reports(view)), default=-1)


def furthest_step(view: View) -> int:
    """Return the most steps that any rank of the present generation is known to have done; -1: not known."""
    reported = max((each.step for report in reports(view) for each in report.progress), default=-1)
    return reported if unknown_generation.newest(view) else max(reported, view.memory.reached)


def is_furthest_step_reported(view: View) -> bool:
    """True if a member that still exists reports how far the present generation has come.

    Otherwise `furthest_step` is the last step reported by members that are gone, or recorded: there may have
    been more.
    """
    present = replace(view, members=tuple(each for each in view.members if each.exists))
    return any(report.progress for report in reports(present))


def reports(view: View) -> tuple[MemberReport, ...]:
    """Return the last reports of the members whose launchers run the present generation."""
    return tuple(
        member.report
        for member in view.members
        if member.report is not None
        and member.report.launcher is not None
        and member.report.launcher.generation == view.memory.generation
    )


def ranks(view: View) -> tuple[RankState, ...]:
    """Return what the launchers report of the ranks of the present generation."""
    return tuple(
        rank
        for report in reports(view)
        if report.launcher is not None
        for rank in report.launcher.ranks
        if rank.generation == view.memory.generation
    )


def ended_well(rank: RankState) -> bool:
    """True if the rank's process is gone and its script ran to its end."""
    return rank.state == "exited" and rank.ending is not None and rank.ending.is_good


def has_protected_state(view: View) -> bool:
    """True if Holdfast protects the script's state: a member holds a snapshot, or a rank has taken one."""
    return any(
        report.slots or report.privates or any(each.snapshot_step >= 0 for each in report.progress)
        for report in reports(view)
    )


def script_keeps_own_state(view: View) -> bool:
    """True if the script never joins, so that only the script knows where it begins after a restart."""
    launchers = (member.report.launcher for member in view.members if member.report is not None)
    return any(
        launcher is not None and not launcher.joins for launcher in launchers
    ) and not has_protected_state(view)


def name_step(view: View, step: int) -> str:
    """Return a step of the present generation in words, for people."""
    return step_in_words(step, own_state=script_keeps_own_state(view), generation=view.memory.generation)


def snapshot_duration_s(view: View) -> float:
    """Return the duration of the last snapshot on the slowest rank; 0 if there was none."""
    return max((each.snapshot_s for report in reports(view) for each in report.progress), default=0.0)
