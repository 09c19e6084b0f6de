"""Distinguish routine reports from those that a job must consider immediately. Pure.

A routine report only confirms that a member is still training. It differs from the previous report only in
times and in the progress of ranks that complete their steps. It leads to no decision before the job's next
round, which is at most a few seconds away. With 2,000 members that report once a second, building a view of
the whole job for each report would take more than one core.

A report of further snapshots can wait too, but only for a moment. The members of a job take their snapshots
at the same step, so one round can consider all of their reports. It cannot wait if its checksums differ from
those of another member, because the next snapshot may overwrite the last one that was the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter, eq, le
from typing import Any, TypeVar

from holdfast.protocol.member_messages import (
    MAX_SEALS,
    PASSING,
    PASSING_PROGRESS,
    HeldChecksum,
    HeldSnapshot,
    MemberReport,
    RankProgress,
)
from supervisor.view.model import JobState, StallWatch

MAX_KNOWN = 8 * MAX_SEALS  # states whose checksums are remembered
# What changes when a member has taken a snapshot, and when it has computed its checksum.
OF_SNAPSHOTS = ("slots", "seals")
OF_SNAPSHOTS_PROGRESS = ("snapshot_step",)


def _fields_except(message: type, passing: Sequence[str]) -> Callable[[Any], Any]:
    return attrgetter(*(each.name for each in fields(message) if each.name not in passing))


_lasting = _fields_except(MemberReport, (*PASSING, "room", "progress"))
_lasting_progress = _fields_except(RankProgress, PASSING_PROGRESS)
_snapshot_step = attrgetter("snapshot_step")
_age = attrgetter("generation", "step")
_Held = TypeVar("_Held", HeldSnapshot, HeldChecksum)
_deciding = _fields_except(MemberReport, (*PASSING, *OF_SNAPSHOTS, "room", "progress"))
_deciding_progress = _fields_except(RankProgress, (*PASSING_PROGRESS, *OF_SNAPSHOTS_PROGRESS))


def is_routine(before: MemberReport | None, report: MemberReport, is_update: bool = False) -> bool:
    """True if `report` equals the previous one, `before`, except for times and the progress of ranks.

    With `is_update`, it is known that `report` differs from `before` only in these.
    """
    if before is None:
        return False
    return (is_update or _agree(before, report, _lasting, _lasting_progress)) and _advances(before, report)


def only_has_newer_snapshots(before: MemberReport | None, report: MemberReport) -> bool:
    """True if `report` differs from a routine one only in further snapshots and their checksums.

    This is False for the first snapshot of a rank. The job must record soon that a state exists, because a
    successor without this record would start from step 0.
    """
    if before is None or not before.slots or any(each.snapshot_step < 0 for each in before.progress):
        return False
    return (
        _agree(before, report, _deciding, _deciding_progress)
        and _advances(before, report)
        and all(map(le, map(_snapshot_step, before.progress), map(_snapshot_step, report.progress)))
        and bool(report.slots)
        and _only_adds(before.slots, report.slots)
        and _only_adds(before.seals, report.seals)
    )


class KnownChecksums:
    """The checksums that the members of a job have reported last, one for each state."""

    def __init__(self) -> None:
        self._crcs: dict[tuple[int, int, int], int] = {}  # by generation, step and size; the newest last

    def differ(self, before: MemberReport, report: MemberReport) -> bool:
        """Add the checksums that are new in `report`. Return True if one differs from that of its state.

        A comparison with all other members would take seconds for each step of a job with 2,000 members.
        """
        found = False
        for seal in report.seals:
            if seal not in before.seals:
                state = (seal.generation, seal.step, seal.total_bytes)
                found |= self._crcs.setdefault(state, seal.crc) != seal.crc
        while len(self._crcs) > MAX_KNOWN:
            del self._crcs[next(iter(self._crcs))]
        return found


def _only_adds(before: Sequence[_Held], after: Sequence[_Held]) -> bool:
    """True if all entries of `after` that are not in `before` are newer than every entry there."""
    newest = max(map(_age, before), default=(-1, -1))
    return all(each in before or _age(each) > newest for each in after)


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
