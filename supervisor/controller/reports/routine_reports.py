"""Distinguish routine reports from those that a job must consider immediately. Pure.

A routine report only confirms that a member is still training. It differs from the previous report only in
times and in the progress of ranks that complete their steps. It leads to no decision before the job's next
round, which is at most a second away. With 2,000 members that report once a second, building a view of the
whole job for each report would take more than one core.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from holdfast.protocol.member_messages import PASSING, PASSING_PROGRESS, MemberReport, RankProgress
from supervisor.view.model import JobState, StallWatch

_lasting = attrgetter(
    *(each.name for each in fields(MemberReport) if each.name not in (*PASSING, "room", "progress"))
)
_lasting_progress = attrgetter(
    *(each.name for each in fields(RankProgress) if each.name not in PASSING_PROGRESS)
)


def is_routine(before: MemberReport | None, report: MemberReport, is_update: bool = False) -> bool:
    """True if `report` equals the previous one, `before`, except for times and the progress of ranks.

    With `is_update`, it is known that `report` differs from `before` only in these.
    """
    if before is None:
        return False
    if not is_update and (
        _lasting(before) != _lasting(report)
        or len(before.progress) != len(report.progress)
        or any(
            _lasting_progress(one) != _lasting_progress(other)
            for one, other in zip(before.progress, report.progress, strict=True)
        )
    ):
        return False
    return all(other.step >= one.step for one, other in zip(before.progress, report.progress, strict=True))


def is_calm(memory: JobState, watch: StallWatch) -> bool:
    """True while routine reports cannot lead to a decision: the group trains well, or has no ranks yet."""
    if memory.stop:
        return False
    if memory.phase == "forming":
        return True
    trains = memory.phase == "running" and memory.settled and memory.incident is None
    return trains and not watch.ranks and not watch.hints and not watch.untold_ns
