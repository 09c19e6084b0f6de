"""Decode the reports of one member, and the parts that it repeats only once. Pure.

Most of a report repeats the one before it: between two steps, only times and the ranks' progress change. A
part of the text that equals the same part of the previous report is not parsed again; the values that were
decoded from it are used again. Decoding a report in full takes most of what a supervisor of 2,000 members
does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.protocol import codec
from holdfast.protocol.member_messages import MemberReport


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive fields of a report, from `first` up to the one before `end` ("" for the last field).

    `instead` replaces them in the text that is parsed.
    """

    first: str
    end: str
    instead: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        names = [each.name for each in fields(MemberReport)]
        return tuple(names[names.index(self.first) : names.index(self.end) if self.end else None])


# The fields between these parts change from report to report.
PARTS = (
    _Part("launcher", "peer_url", ',"launcher":null'),
    _Part("stalls", "unmoved_s"),
    _Part("launcher_silent", ""),
)


@dataclass(frozen=True, slots=True)
class _Known:
    """A part of the last report: its text, and the values that were decoded from it."""

    text: str
    values: dict[str, Any]


class ReportDecoder:
    """Decodes the successive reports of one connection."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()

    def decode(self, text: str) -> MemberReport:
        """Return exactly what `codec.decode` returns. Raises `InvalidMessage`."""
        texts = _parts_of(text) if len(text) <= codec.MAX_MESSAGE_BYTES else ()
        if not texts:
            self._known = ()
            return codec.decode(MemberReport, text)
        repeated: dict[str, Any] = {}
        left = text
        for part, found, known in zip(PARTS, texts, self._known, strict=False):
            if found == known.text:
                left = left.replace(found, part.instead, 1)
                repeated.update(known.values)
        try:
            report = codec.decode(MemberReport, left)
        except codec.InvalidMessage:
            self._known = ()
            raise
        if repeated:
            report = replace(report, **repeated)
        self._known = tuple(
            known if known is not None and known.text == found else _Known(found, _values(part, report))
            for part, found, known in zip(PARTS, texts, self._known or (None,) * len(PARTS), strict=True)
        )
        return report


def _parts_of(text: str) -> tuple[str, ...]:
    """Return the texts of `PARTS`; () for a report that is not written as `codec.encode` writes it.

    A quotation mark within a JSON text has a backslash before it, so these marks are names of fields. If a
    sender wrote them elsewhere, the rest of the report would have unknown fields, as it has now.
    """
    found = []
    at = 0
    for part in PARTS:
        at = text.find(f',"{part.first}":', at)
        end = text.find(f',"{part.end}":', at) if part.end else text.rfind("}")
        if not 0 <= at < end:
            return ()
        found.append(text[at:end])
        at = end
    return tuple(found)


def _values(part: _Part, report: MemberReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in part.names}
