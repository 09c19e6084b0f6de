"""Distinguish routine reports from those that a job must consider immediately. Pure.

A routine report only confirms that a member is still training. It differs from the previous report only in
times and in the progress of ranks that complete their steps. It leads to no decision before the job's next
round, which is at most a second away. With 2,000 members that report once a second, building a view of the
whole job for each report would take more than one core.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from holdfast.protocol.member_messages import MemberReport, RankProgress
from supervisor.view.model import JobState, StallWatch

# The fields that change with each report while a group trains. A change of any other field is news.
PASSING = frozenset({"sequence", "now_ns", "progress", "room", "lag_s", "lag_p99_s", "unmoved_s"})
PASSING_PROGRESS = frozenset(
    {
        "step",
        "phase",
        "loss",
        "grad_norm",
        "samples",
        "tokens",
        "flops",
        "step_s",
        "p99_s",
        "own_s",
        "own_least_s",
        "own_data_s",
        "own_steps",
        "snapshot_s",
        "tail_s",
        "tail_usual_s",
    }
)
_lasting = attrgetter(*(each.name for each in fields(MemberReport) if each.name not in PASSING))
_lasting_progress = attrgetter(
    *(each.name for each in fields(RankProgress) if each.name not in PASSING_PROGRESS)
)


def is_routine(before: MemberReport | None, report: MemberReport) -> bool:
    """True if `report` equals the previous one, `before`, except for times and the progress of ranks."""
    return (
        before is not None
        and _lasting(before) == _lasting(report)
        and len(before.progress) == len(report.progress)
        and all(
            _lasting_progress(one) == _lasting_progress(other) and other.step >= one.step
            for one, other in zip(before.progress, report.progress, strict=True)
        )
    )


def is_calm(memory: JobState, watch: StallWatch) -> bool:
    """True while routine reports cannot lead to a decision: the group trains well, or has no ranks yet."""
    if memory.stop:
        return False
    if memory.phase == "forming":
        return True
    trains = memory.phase == "running" and memory.settled and memory.incident is None
    return trains and not watch.ranks and not watch.hints and not watch.untold_ns
