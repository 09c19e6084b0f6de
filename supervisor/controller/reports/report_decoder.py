"""Decode the reports of one member without parsing the parts that repeat the previous report. Pure.

Most of a report repeats the previous one: between two steps, only times and the ranks' progress change. A
sidecar then sends only these (`report_updates`). An older sidecar sends everything. If the text of a part is
the same as last time, the decoder reuses the part's values instead of parsing it again. A supervisor of 2,000
members would otherwise spend most of its time decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, TypeAlias

from holdfast.protocol import codec
from holdfast.protocol.member_messages import MemberReport
from supervisor.controller.limits.retained_size import most_bytes, retained_bytes
from supervisor.controller.reports import report_updates


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
_Span: TypeAlias = "tuple[int, int]"


def _mark(part: str) -> _Mark:
    """Return what identifies a part's text: the text itself or, to save memory, its hash."""
    return part if len(part) <= KEPT_CHARS else sha256(part.encode()).digest()


@dataclass(frozen=True, slots=True)
class _Known:
    """A part of the last report: its length, what identifies its text, and the memory that it takes."""

    length: int
    mark: _Mark
    retained_bytes: int

    def is_at(self, text: str, begin: int) -> bool:
        """True if the text of this part is in `text` at `begin`."""
        mark = self.mark
        if isinstance(mark, str):
            return text.startswith(mark, begin)
        return _mark(text[begin : begin + self.length]) == mark


def _known(text: str, values: dict[str, Any]) -> _Known:
    copied = retained_bytes(values.get("launcher"), texts=False)  # the server converts its times
    retained = sum(map(retained_bytes, values.values())) + copied + min(len(text), KEPT_CHARS)
    return _Known(len(text), _mark(text), retained)


class ReportDecoder:
    """Decodes the successive reports of one connection."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()  # one for each of `PARTS`, or none
        self._values: dict[str, Any] = {}  # the values of the fields in `PARTS`
        self._known_bytes = 0
        self._last: MemberReport | None = None  # the last report
        # How the last report names its member and describes its launcher. The receiver of the report may
        # replace both.
        self._as_sent: dict[str, Any] = {}
        self.was_update = False  # whether the last text was an update
        self._whole_bytes = 0  # `retained_bytes` after the last complete report, including later updates
        # A bound on the memory that the last report takes, including what the decoder keeps of it.
        self.retained_bytes = 0

    def decode(self, text: str) -> MemberReport:
        """Return the report in `text`, which is either a whole report or an update with only the changes.

        For a complete report, this is exactly what `codec.decode` returns. Raises `InvalidMessage`.
        """
        last, self._last = self._last, None
        self.was_update = text.startswith(report_updates.BEGINNING)
        if self.was_update:
            if last is None:
                raise codec.InvalidMessage("ReportUpdate: no report precedes it")
            report = report_updates.updated(last, text, **self._as_sent)
        else:
            report = self._decode_whole(text)
            self._as_sent = {"member": report.member, "launcher": report.launcher}
            self._whole_bytes = self.retained_bytes + report_updates.most_added_bytes(report)
        self._last, self.retained_bytes = report, self._whole_bytes
        return report

    def _decode_whole(self, text: str) -> MemberReport:
        changed = self._changed(text) if len(text) <= codec.MAX_MESSAGE_BYTES else ""
        if not changed:
            return self._decode_parts(text)
        report = self._complete(changed, self._values)
        self.retained_bytes = most_bytes(changed) + self._known_bytes
        return report

    def _changed(self, text: str) -> str:
        """Return `text` without `PARTS` if all of them repeat the last report, as is usual; otherwise ""."""
        pieces, at = [], 0
        for (first, after), known in zip(_MARKS, self._known, strict=False):
            begin = text.find(first, at)
            end = begin + known.length
            if begin < 0 or not known.is_at(text, begin):
                return ""
            # A known text contains no mark of its end, so it ends here, as `_spans` would find.
            if not (text.startswith(after, end) if after else text.rfind("}") == end):
                return ""
            pieces.append(text[at:begin])
            at = end
        return "".join((*pieces, text[at:])) if pieces else ""

    def _decode_parts(self, text: str) -> MemberReport:
        """Decode a report that differs from the last one in some part, or is the first one."""
        spans = _spans(text) if len(text) <= codec.MAX_MESSAGE_BYTES else ()
        if not spans:
            self._forget()
            self.retained_bytes = 2 * most_bytes(text)
            return codec.decode(MemberReport, text)
        parts = zip(spans, self._known, _NAMES, strict=False)
        repeats = [(span, names) for span, known, names in parts if _is_at(known, text, span)]
        values = {name: self._values[name] for _, names in repeats for name in names}
        report = self._complete(_without(text, [span for span, _ in repeats]), values)
        of_parts = [{name: getattr(report, name) for name in names} for names in _NAMES]
        self._known = tuple(
            _known(text[begin:end], each) for (begin, end), each in zip(spans, of_parts, strict=True)
        )
        self._values = {name: value for each in of_parts for name, value in each.items()}
        self._known_bytes = sum(each.retained_bytes for each in self._known)
        self.retained_bytes = most_bytes(_without(text, spans)) + self._known_bytes
        return report

    def _complete(self, changed: str, values: dict[str, Any]) -> MemberReport:
        """Decode the text of a report without the fields that `values` has."""
        try:
            value = codec.parse(changed, MemberReport.__name__)
            return codec.from_json(MemberReport, value, known=values)
        except codec.InvalidMessage:
            self._forget()
            raise

    def _forget(self) -> None:
        self._known, self._values, self._known_bytes = (), {}, 0


def _is_at(known: _Known, text: str, span: _Span) -> bool:
    begin, end = span
    return known.length == end - begin and known.is_at(text, begin)


def _without(text: str, spans: Sequence[_Span]) -> str:
    """Return `text` without `spans`."""
    edges = (0, *(edge for span in spans for edge in span), len(text))
    return "".join([text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)])


def _spans(text: str) -> tuple[_Span, ...]:
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
