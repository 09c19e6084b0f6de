"""Make a member's report from its previous one and an update. Pure."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from holdfast.protocol import codec
from holdfast.protocol.codec import InvalidMessage
from holdfast.protocol.member_messages import (
    MAX_PASSING_TEXT,
    PASSING,
    PASSING_PROGRESS,
    PASSING_ROOM,
    MemberReport,
    MemoryUse,
    RankProgress,
    ReportUpdate,
)

# the beginning of an update's text; a report's text begins with the report's first field
BEGINNING = '{"update_of":'
# The maximum amount of memory that updates add for each rank, because its texts may become longer. The memory
# counted for a report already includes an object for each of its values.
RANK_BYTES = MAX_PASSING_TEXT * len([each for each in fields(RankProgress) if each.type == "str"])
_read_report = codec.row_reader(MemberReport, PASSING, MAX_PASSING_TEXT)
_read_room = codec.row_reader(MemoryUse, PASSING_ROOM, MAX_PASSING_TEXT)
_read_progress = codec.row_reader(RankProgress, PASSING_PROGRESS, MAX_PASSING_TEXT)


def most_added_bytes(report: MemberReport) -> int:
    """Return a bound on the memory that any number of updates adds to what `report` takes."""
    return RANK_BYTES * len(report.progress)


def updated(report: MemberReport, text: str, **changes: Any) -> MemberReport:
    """Return a copy of `report` with the values in the text of an update, and with `changes`.

    Raises `InvalidMessage` for an update of another report, and for a value that does not fit.
    """
    update = codec.decode(ReportUpdate, text)
    if update.update_of != report.sequence:
        raise InvalidMessage(
            f"ReportUpdate: an update of report {update.update_of}, not of {report.sequence}"
        )
    made: MemberReport = _read_report(report, update.report)
    if update.room:
        changes["room"] = _read_room(report.room, update.room)
    if update.progress:
        changes["progress"] = _progress(report.progress, update.progress)
    for name, value in changes.items():
        object.__setattr__(made, name, value)  # nothing else refers to it yet; see `MemberServer._accept`
    return made


def _progress(before: tuple[RankProgress, ...], rows: Any) -> tuple[RankProgress, ...]:
    if not isinstance(rows, list) or len(rows) != len(before):
        raise InvalidMessage(f"ReportUpdate.progress: not a list of {len(before)}, the number of ranks")
    return tuple(map(_read_progress, before, rows))
