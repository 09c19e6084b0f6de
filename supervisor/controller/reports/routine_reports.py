"""Distinguish routine reports from those that a job must consider immediately. Pure.

A routine report only confirms that a member is still training. It differs from the previous report only in
times and in the progress of ranks that complete their steps. It leads to no decision before the job's next
round, which is at most a second away. With 2,000 members that report once a second, building a view of the
whole job for each report would take more than one core.

A report of new snapshots can wait too, but only for a moment, because the job compares their checksums. The
members of a job take their snapshots at the same step, so one round can consider all of their reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter, eq
from typing import Any

from holdfast.protocol.member_messages import PASSING, PASSING_PROGRESS, MemberReport, RankProgress
from supervisor.view.model import JobState, StallWatch

# What changes when a member has taken a snapshot, and when it has computed its checksum.
OF_SNAPSHOTS = ("slots", "seals")
OF_SNAPSHOTS_PROGRESS = ("snapshot_step",)


def _fields_except(message: type, passing: Sequence[str]) -> Callable[[Any], Any]:
    return attrgetter(*(each.name for each in fields(message) if each.name not in passing))


_lasting = _fields_except(MemberReport, (*PASSING, "room", "progress"))
_lasting_progress = _fields_except(RankProgress, PASSING_PROGRESS)
_deciding = _fields_except(MemberReport, (*PASSING, *OF_SNAPSHOTS, "room", "progress"))
_deciding_progress = _fields_except(RankProgress, (*PASSING_PROGRESS, *OF_SNAPSHOTS_PROGRESS))


def is_routine(before: MemberReport | None, report: MemberReport, is_update: bool = False) -> bool:
    """True if `report` equals the previous one, `before`, except for times and the progress of ranks.

    With `is_update`, it is known that `report` differs from `before` only in these.
    """
    if before is None:
        return False
    return (is_update or _agree(before, report, _lasting, _lasting_progress)) and _advances(before, report)


def only_has_snapshots(before: MemberReport | None, report: MemberReport) -> bool:
    """True if `report` differs from a routine one only in further snapshots.

    This is False for the first snapshot of a member. The job must record soon that a state exists, because a
    successor without this record would start from step 0.
    """
    if before is None or not before.slots:
        return False
    return _agree(before, report, _deciding, _deciding_progress) and _advances(before, report)


def _agree(
    before: MemberReport,
    report: MemberReport,
    of_report: Callable[[MemberReport], Any],
    of_progress: Callable[[RankProgress], Any],
) -> bool:
    return (
        of_report(before) == of_report(report)
        and len(before.progress) == len(report.progress)
        and all(map(eq, map(of_progress, before.progress), map(of_progress, report.progress)))
    )


def _advances(before: MemberReport, report: MemberReport) -> bool:
    return all(other.step >= one.step for one, other in zip(before.progress, report.progress, strict=True))


def is_calm(memory: JobState, watch: StallWatch) -> bool:
    """True while routine reports cannot lead to a decision: the group trains well, or has no ranks yet."""
    if memory.stop:
        return False
    if memory.phase == "forming":
        return True
    trains = memory.phase == "running" and memory.settled and memory.incident is None
    return trains and not watch.ranks and not watch.hints and not watch.untold_ns
