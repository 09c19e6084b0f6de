"""Decode the reports of one member without parsing the parts that repeat the previous report. Pure.

Most of a report repeats the previous one: between two steps, only times and the ranks' progress change. If a
part of the text is the same as last time, its decoded values are reused instead of parsing it again. A
supervisor of 2,000 members would otherwise spend most of its time decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, TypeAlias

from holdfast.protocol import codec
from holdfast.protocol.member_messages import MemberReport
from supervisor.controller.limits.retained_size import most_bytes, retained_bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive fields of a report, from `first` up to but excluding `end` ("": up to the last field)."""

    first: str
    end: str

    @property
    def names(self) -> tuple[str, ...]:
        names = [each.name for each in fields(MemberReport)]
        return tuple(names[names.index(self.first) : names.index(self.end) if self.end else None])


# The fields between these parts change with each report.
PARTS = (_Part("launcher", "peer_url"), _Part("stalls", "unmoved_s"), _Part("launcher_silent", ""))
_MARKS = tuple((f',"{each.first}":', f',"{each.end}":' if each.end else "") for each in PARTS)
_NAMES = tuple(each.names for each in PARTS)


KEPT_CHARS = 16_384  # for a longer part, only a hash is kept
_Mark: TypeAlias = "str | bytes"


def _mark(part: str) -> _Mark:
    """Return what identifies a part's text: the text itself or, to save memory, its hash."""
    return part if len(part) <= KEPT_CHARS else sha256(part.encode()).digest()


@dataclass(frozen=True, slots=True)
class _Known:
    """A part of the last report: its length, what identifies its text, and the values decoded from it."""

    length: int
    mark: _Mark
    values: dict[str, Any]
    retained_bytes: int

    def matches(self, text: str, begin: int, end: int) -> bool:
        if self.length != end - begin:
            return False
        mark = self.mark
        return text.startswith(mark, begin) if isinstance(mark, str) else _mark(text[begin:end]) == mark


def _known(text: str, values: dict[str, Any]) -> _Known:
    copied = retained_bytes(values.get("launcher"), texts=False)  # the server converts its times
    retained = sum(map(retained_bytes, values.values())) + copied + min(len(text), KEPT_CHARS)
    return _Known(len(text), _mark(text), values, retained)


class ReportDecoder:
    """Decodes the successive reports of one connection."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()
        # A bound on the memory that the last report takes, including what the decoder keeps of it.
        self.retained_bytes = 0

    def decode(self, text: str) -> MemberReport:
        """Return exactly what `codec.decode` returns. Raises `InvalidMessage`."""
        spans = _spans(text) if len(text) <= codec.MAX_MESSAGE_BYTES else ()
        if not spans:
            self._known, self.retained_bytes = (), 2 * most_bytes(text)
            return codec.decode(MemberReport, text)
        repeated: dict[str, Any] = {}
        left: list[str] = []
        at = 0
        for (begin, end), known in zip(spans, self._known, strict=False):
            if known.matches(text, begin, end):
                left.append(text[at:begin])
                at = end
                repeated.update(known.values)
        left.append(text[at:])
        try:
            value = codec.parse("".join(left), MemberReport.__name__)
            report = codec.from_json(MemberReport, value, known=repeated)
        except codec.InvalidMessage:
            self._known = ()
            raise
        if len(repeated) < _ALL:
            self._known = tuple(
                _known(text[begin:end], {name: getattr(report, name) for name in names})
                for (begin, end), names in zip(spans, _NAMES, strict=True)
            )
        between = left if len(repeated) == _ALL else _between(text, spans)
        self.retained_bytes = most_bytes("".join(between)) + sum(each.retained_bytes for each in self._known)
        return report


_ALL = sum(map(len, _NAMES))


def _between(text: str, spans: tuple[tuple[int, int], ...]) -> list[str]:
    """Return the pieces of `text` that are in none of `spans`."""
    edges = (0, *(edge for span in spans for edge in span), len(text))
    return [text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _spans(text: str) -> tuple[tuple[int, int], ...]:
    """Return where `PARTS` begin and end; () if the report is not in the form that `codec.encode` writes.

    In a JSON string, a backslash precedes each quotation mark, so these marks can only be names of fields. A
    field with one of these names in any other place would be an unknown field, as in a full decoding.
    """
    found = []
    at = 0
    for first, after in _MARKS:
        at = text.find(first, at)
        end = text.find(after, at) if after else text.rfind("}")
        if not 0 <= at < end:
            return ()
        found.append((at, end))
        at = end
    return tuple(found)
