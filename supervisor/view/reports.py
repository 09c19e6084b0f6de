"""Read the members' reports about the current generation from a view. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.protocol.launcher_messages import RankInspection, RankState
from holdfast.protocol.member_messages import MemberReport, RankProgress, RankStall
from supervisor.identity_cache import by_identity
from supervisor.view import members, unknown_generation
from supervisor.view.model import View
from supervisor.wording import step_in_words


def inspections(view: View, report: MemberReport) -> tuple[RankInspection, ...]:
    """Return the newest inspections of the member's ranks; () if they belong to another generation."""
    return report.looks if report.looked_for == view.memory.generation else ()


@by_identity(1)
def all_inspections(view: View) -> tuple[RankInspection, ...]:
    """Return the newest inspections of all ranks, even of members whose launcher has not reported."""
    return tuple(
        inspection
        for member in view.members
        if member.report is not None
        for inspection in inspections(view, member.report)
    )


@by_identity(1)
def inspections_of_ranks(view: View) -> Mapping[int, tuple[RankInspection, ...]]:
    """Return the inspections in `all_inspections` by rank; usually one per rank."""
    found: dict[int, tuple[RankInspection, ...]] = {}
    for each in all_inspections(view):
        found[each.rank] = (*found.get(each.rank, ()), each)
    return found


def members_without_rank_report(view: View) -> tuple[str, ...]:
    """Return the members whose ranks are unknown because the supervisor or a sidecar has just started.

    Members whose launcher does not respond are not included, because that is a fault in itself.
    """
    return tuple(
        member.name
        for member in view.members
        if member.name in view.memory.positions
        and (member.report is None or member.report.launcher is None)
        and not members.unresponsive_launcher(member)
    )


def progress(view: View, report: MemberReport) -> tuple[RankProgress, ...]:
    """Return the progress of the member's ranks; () if its launcher runs another generation."""
    launcher = report.launcher
    return report.progress if launcher is not None and launcher.generation == view.memory.generation else ()


def stalls(view: View, report: MemberReport) -> tuple[RankStall, ...]:
    """Return the stalls of the current generation that have not ended with a later step."""
    return tuple(
        stall
        for stall in report.stalls
        if stall.generation == view.memory.generation and step_of(report, stall.rank) <= stall.step
    )


def step_of(report: MemberReport, rank: int) -> int:
    """Return how many steps the rank has completed according to this report; -1 if it lacks the rank."""
    return _steps(report.progress).get(rank, -1)


@by_identity(1)
def _steps(progress_now: tuple[RankProgress, ...]) -> Mapping[int, int]:
    return {each.rank: each.step for each in reversed(progress_now)}


def is_unwinding(report: MemberReport, rank: RankState) -> bool:
    """True while an exception may be ending the rank: it runs `finally` blocks and completes no steps."""
    hint = rank.ending
    if hint is None or not hint.unwinding or rank.state == "exited":
        return False
    return not 0 <= hint.step < step_of(report, rank.rank)


def pause_left_s(report: MemberReport, rank: int) -> float:
    """Return the seconds until the rank's current pause reaches its limit; 0 outside a pause."""
    return next((each.pause_left_s for each in report.progress if each.rank == rank), 0.0)


def step_of_rank(view: View, rank: int) -> int:
    """Return how many steps the rank has completed in the current generation; -1 if unknown."""
    return _steps_of_ranks(view).get(rank, -1)


@by_identity(1)
def _steps_of_ranks(view: View) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for report in reports(view):
        for rank, step in _steps(report.progress).items():
            found[rank] = max(step, found.get(rank, -1))
    return found


def furthest_step(view: View) -> int:
    """Return the most steps that any rank of the current generation has completed; -1 if unknown."""
    reported = max((each.step for report in reports(view) for each in report.progress), default=-1)
    return reported if unknown_generation.newest(view) else max(reported, view.memory.reached)


def is_furthest_step_reported(view: View) -> bool:
    """True if a member that still exists reports the progress of the current generation.

    If no such member does, `furthest_step` relies on the journal or on the last reports of members that no
    longer exist, and can be too low.
    """
    present = replace(view, members=tuple(each for each in view.members if each.exists))
    return any(report.progress for report in reports(present))


def reports(view: View) -> tuple[MemberReport, ...]:
    """Return the last reports of the members whose launchers run the current generation."""
    return tuple(
        member.report
        for member in view.members
        if member.report is not None
        and member.report.launcher is not None
        and member.report.launcher.generation == view.memory.generation
    )


def last_progress(view: View) -> list[RankProgress]:
    """Return the last reported progress of the members with ranks, possibly of an earlier generation.

    A member that has lost its ranks to another one may still exist and report, for example because its
    pod cannot be deleted before its node is back.
    """
    return [
        each
        for member in view.members
        if member.report is not None and member.name in view.memory.positions
        for each in member.report.progress
    ]


def ranks(view: View) -> tuple[RankState, ...]:
    """Return the states of the current generation's ranks, as reported by their launchers."""
    return tuple(
        rank
        for report in reports(view)
        if report.launcher is not None
        for rank in report.launcher.ranks
        if rank.generation == view.memory.generation
    )


def has_finished(rank: RankState) -> bool:
    """True if the rank's process is gone and its script ran to its end."""
    return rank.state == "exited" and rank.ending is not None and rank.ending.is_good


def has_protected_state(view: View) -> bool:
    """True if Holdfast protects the script's state: a member holds a snapshot, or a rank has made one."""
    return any(
        report.slots or report.privates or any(each.snapshot_step >= 0 for each in report.progress)
        for report in reports(view)
    )


def script_keeps_own_state(view: View) -> bool:
    """True if the script does not join, so only the script knows where it resumes after a restart."""
    launchers = (member.report.launcher for member in view.members if member.report is not None)
    return any(
        launcher is not None and not launcher.joins for launcher in launchers
    ) and not has_protected_state(view)


def name_step(view: View, step: int) -> str:
    """Describe a step of the current generation in words, for display."""
    return step_in_words(step, own_state=script_keeps_own_state(view), generation=view.memory.generation)


def snapshot_duration_s(view: View) -> float:
    """Return the duration of the last snapshot on the slowest rank; 0 if there was none."""
    return max((each.snapshot_s for report in reports(view) for each in report.progress), default=0.0)


def finite(text: str) -> float | None:
    """Return the number that `text` contains; None if it is not finite or not a number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
