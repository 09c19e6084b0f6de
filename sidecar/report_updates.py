"""Compose the text of each report to the supervisor: complete, or as an update of the previous one. Pure.

Most reports repeat the previous one except for times and the ranks' progress. An update contains only the
values that have changed, which saves both ends most of the work.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from holdfast.protocol import codec
from holdfast.protocol.member_messages import (
    MAX_PASSING_TEXT,
    PASSING,
    PASSING_PROGRESS,
    PASSING_ROOM,
    MemberReport,
    RankProgress,
    ReportUpdate,
)

_ELSEWHERE = ("room", "progress")
_passing, _passing_room, _passing_progress = (
    attrgetter(*names) for names in (PASSING, PASSING_ROOM, PASSING_PROGRESS)
)
_lasting = attrgetter(
    *(each.name for each in fields(MemberReport) if each.name not in (*PASSING, *_ELSEWHERE)), "room.volume"
)
_lasting_progress = attrgetter(
    *(each.name for each in fields(RankProgress) if each.name not in PASSING_PROGRESS)
)


class ReportWriter:
    """Writes the successive reports of one connection. With `updates`, the supervisor can read updates."""

    def __init__(self, updates: bool) -> None:
        self._updates = updates
        self._last: MemberReport | None = None  # the last report that was written

    def text(self, report: MemberReport) -> str:
        """Return the JSON of `report`, or of the update that turns the last report into it."""
        last, self._last = self._last, report
        update = update_of(last, report) if self._updates and last is not None else None
        return codec.encode(report if update is None else update).decode()


def update_of(before: MemberReport, report: MemberReport) -> ReportUpdate | None:
    """Return the update that turns `before` into `report`; None if any other than passing values differ."""
    pairs = list(zip(before.progress, report.progress, strict=False))
    if (
        len(before.progress) != len(report.progress)
        or _lasting(before) != _lasting(report)
        or any(_lasting_progress(one) != _lasting_progress(other) for one, other in pairs)
    ):
        return None
    progress = [_passing_progress(each) for each in report.progress]
    texts = [each for row in progress for each in row if type(each) is str]
    if any(len(each) > MAX_PASSING_TEXT or not each.isascii() for each in texts):
        return None
    if progress == [_passing_progress(each) for each in before.progress]:
        progress = []
    room = () if report.room == before.room else _passing_room(report.room)
    return ReportUpdate(before.sequence, _passing(report), room, progress)
