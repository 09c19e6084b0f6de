"""A report that arrives as an update of the previous one is equal to the one that the sidecar composed."""

from __future__ import annotations

import json
import zlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import (
    MAX_PASSING_TEXT,
    PASSING,
    PASSING_PROGRESS,
    PASSING_ROOM,
    UPDATES,
    HeldSnapshot,
    MemberReport,
    MemoryUse,
    RankProgress,
    UncommittedWork,
)
from sidecar.report_updates import ReportWriter
from supervisor.controller.limits.retained_size import retained_bytes
from supervisor.controller.reports import report_updates
from supervisor.controller.reports.report_decoder import ReportDecoder
from supervisor.controller.reports.routine_reports import is_routine
from tests.unit.supervisor.job_views import launcher, progress, rank, report

FIRST = report(
    "m0",
    launcher(rank(0), rank(1)),
    sequence=1,
    progress=(progress(0, 7), progress(1, 7)),
    slots=(HeldSnapshot(1, 4, 8),),
    room=MemoryUse("v", 1, 2),
)
KINDS = {
    each.name: str(each.type) for each in (*fields(RankProgress), *fields(MemberReport), *fields(MemoryUse))
}

RANK_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 1 << 60),
        "phase": st.sampled_from(("forward", "backward", "x" * 100)),
        "loss": st.sampled_from(("0.5", "nan", "inf")),
        "tokens": st.integers(0, 1 << 60),
        "own_s": st.floats(0, 1e9),
        "snapshot_step": st.integers(0, 9),
        "late": st.just((3,)),
        "early": st.just(UncommittedWork(1.0)),
    },
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "now_ns": st.integers(0, 1 << 60),
        "lag_s": st.floats(0, 1e9),
        "unmoved_s": st.floats(-1, 1e9),
        "room": st.builds(MemoryUse, st.sampled_from(("v", "w")), st.integers(0, 9), st.integers(0, 1 << 50)),
        "launcher": st.sampled_from((None, launcher(rank(0, Ending(5, 1))), FIRST.launcher)),
        "epoch": st.integers(0, 2),
        "progress": st.lists(RANK_CHANGES, max_size=3),
    },
)


def changed(sent: MemberReport, change: dict[str, Any]) -> MemberReport:
    """Return the next report, in which the ranks have the progress in `change`."""
    found = dict(change, sequence=sent.sequence + 1)
    if "progress" in change:
        ranks = [*sent.progress, *(progress(n, 7) for n in range(len(sent.progress), 3))]
        pairs = zip(ranks, change["progress"], strict=False)
        found["progress"] = tuple(replace(each, **values) for each, values in pairs)
    return replace(sent, **found)


@given(st.lists(CHANGES, max_size=8))
@settings(max_examples=200)
def test_what_is_received_is_what_was_sent(changes: list[dict[str, Any]]) -> None:
    """The server puts another name and launcher into what it receives, which later reports must not have."""
    writer, decoder, sent = ReportWriter(updates=True), ReportDecoder(), FIRST
    for change in ({}, *changes):
        sent = changed(sent, change)
        received = decoder.decode(writer.text(sent))
        assert received == sent
        object.__setattr__(received, "member", "the proven name")
        object.__setattr__(received, "launcher", None)


ALL = [
    *(("report", each.name) for each in fields(MemberReport)),
    *(("progress", each.name) for each in fields(RankProgress)),
    *(("room", each.name) for each in fields(MemoryUse)),
]
OTHERS: dict[str, Any] = {
    "launcher": None,
    "progress": (progress(0, 7),),
    "storage": None,
    "early": UncommittedWork(2.0),
}


def with_other(part: str, name: str) -> MemberReport:
    """Return a report in which one field has another value."""
    found: Any = {"report": FIRST, "progress": FIRST.progress[1], "room": FIRST.room}[part]
    value = getattr(found, name)
    if name in OTHERS:
        value = OTHERS[name]
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, (int, float)):
        value += 1
    elif isinstance(value, str):
        value += "x"
    else:
        return FIRST
    other: Any = replace(found, **{name: value})
    if part == "report":
        return replace(FIRST, **{"sequence": 2, name: value})
    given: dict[str, Any] = {part: other if part == "room" else (FIRST.progress[0], other)}
    return replace(FIRST, sequence=2, **given)


@pytest.mark.parametrize(("part", "name"), ALL)
def test_only_passing_values_are_sent_as_an_update(part: str, name: str) -> None:
    sent = with_other(part, name)
    writer, decoder = ReportWriter(updates=True), ReportDecoder()
    assert decoder.decode(writer.text(FIRST)) == FIRST
    text = writer.text(sent)
    passing = {"report": PASSING, "progress": PASSING_PROGRESS, "room": PASSING_ROOM}[part]
    is_same = replace(sent, sequence=1) == FIRST
    assert text.startswith(report_updates.BEGINNING) == (name in passing or is_same), text
    received = decoder.decode(text)
    assert received == sent
    if text.startswith(report_updates.BEGINNING):
        assert is_routine(FIRST, received)


def test_a_supervisor_that_cannot_read_updates_receives_complete_reports() -> None:
    writer = ReportWriter(updates=False)
    for sequence in (1, 2):
        sent = replace(FIRST, sequence=sequence)
        assert codec.decode(MemberReport, writer.text(sent)) == sent


def test_an_update_of_a_group_without_news_is_short() -> None:
    ranks = tuple(progress(n, 7) for n in range(8))
    writer, sent = ReportWriter(updates=True), replace(FIRST, progress=ranks)
    whole = writer.text(sent)
    assert len(writer.text(replace(sent, sequence=2, now_ns=10**15, lag_s=0.001))) < len(whole) / 20


ROWS: dict[str, list[Any]] = {
    "report": [2, 5, 0.5, 0.5, -1.0],
    "room": [1, 2, 3, 4, 5, 6],
    "progress": [[8, "forward", "1", "1", 1, 1, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 9, 0.5, 0.5, 0.5]] * 2,
}


def update(**given: Any) -> str:
    return json.dumps({"update_of": 1, **ROWS, **given}, separators=(",", ":"))


def with_value(part: str, name: str, value: Any) -> str:
    """Return an update with a value in the last row of `part`."""
    names = {"report": PASSING, "room": PASSING_ROOM, "progress": PASSING_PROGRESS}[part]
    row = list(ROWS[part][-1] if part == "progress" else ROWS[part])
    row[names.index(name)] = value
    return update(**{part: [ROWS[part][0], row] if part == "progress" else row})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (update(update_of=7), "an update of report 7, not of 1"),
        (update(report=[2, 5, 0.5]), "MemberReport: [2, 5, 0.5] is not a list of 5"),
        (update(report={"sequence": 2}), "MemberReport: {'sequence': 2} is not a list of 5"),
        (with_value("report", "sequence", "2"), "MemberReport.sequence: '2' is not int"),
        (with_value("report", "now_ns", 1 << 64), "MemberReport.now_ns: out of range"),
        (with_value("report", "lag_s", 1e300), "the limit is 1e+10 s"),
        (with_value("report", "lag_s", float("nan")), "MemberReport.lag_s: nan is not a finite number"),
        (update(room=7), "MemoryUse: 7 is not a list of 6"),
        (with_value("room", "free_bytes", 1.5), "MemoryUse.free_bytes: 1.5 is not int"),
        (update(progress=ROWS["progress"][:1]), "not a list of 2, the number of ranks"),
        (update(progress="ab"), "not a list of 2, the number of ranks"),
        (update(progress=[ROWS["progress"][0], None]), "RankProgress: None is not a list of 16"),
        (with_value("progress", "step", True), "RankProgress.step: True is not int"),
        (with_value("progress", "loss", 0.5), "RankProgress.loss: 0.5 is not str"),
        (
            with_value("progress", "loss", "1" * 33),
            "1' is not a text of at most 32 ASCII characters",
        ),
        (
            with_value("progress", "loss", "\u0661"),
            "is not a text of at most 32 ASCII characters",
        ),
        (update(more=1), "unknown field"),
        ('{"update_of":1}', "missing"),
        ('{"update_of":', "not JSON"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_with_the_reason(text: str, why: str) -> None:
    decoder = ReportDecoder()
    decoder.decode(ReportWriter(updates=True).text(FIRST))
    with pytest.raises(codec.InvalidMessage) as refused:
        decoder.decode(text)
    assert why in str(refused.value)
    with pytest.raises(codec.InvalidMessage, match="no report precedes it"):
        decoder.decode(update())


def test_an_integer_is_read_as_the_float_that_its_field_has() -> None:
    decoder = ReportDecoder()
    decoder.decode(ReportWriter(updates=True).text(FIRST))
    received = decoder.decode(with_value("report", "lag_s", 3))
    assert received.lag_s == 3.0
    assert isinstance(received.lag_s, float)


def test_the_first_message_of_a_connection_is_a_report() -> None:
    with pytest.raises(codec.InvalidMessage, match="no report precedes it"):
        ReportDecoder().decode(update())


def test_no_series_of_updates_takes_more_memory_than_is_counted() -> None:
    decoder = ReportDecoder()
    ranks = tuple(progress(n, 7) for n in range(512))
    first = replace(FIRST, progress=ranks, sequence=2)
    received = decoder.decode(ReportWriter(updates=True).text(first))
    for size in (1, MAX_PASSING_TEXT):
        row = [
            {"int": (1 << 64) - 1, "float": 1e10, "str": "1" * size}[KINDS[name]] for name in PASSING_PROGRESS
        ]
        report_row = [2, *([1e10 if KINDS[name] == "float" else (1 << 64) - 1 for name in PASSING[1:]])]
        room = [(1 << 64) - 1] * len(PASSING_ROOM)
        received = decoder.decode(update(update_of=2, report=report_row, room=room, progress=[row] * 512))
    assert retained_bytes(received) <= decoder.retained_bytes
    assert decoder.retained_bytes < 8 << 20


def test_the_order_of_the_values_belongs_to_the_name_of_the_protocol() -> None:
    """Whoever adds a value gives the protocol another name, so that both ends agree on the order."""
    assert UPDATES == "holdfast.report-updates.1"
    assert [len(each) for each in (PASSING, PASSING_ROOM, PASSING_PROGRESS)] == [5, 6, 16]
    assert zlib.crc32(" ".join((*PASSING, *PASSING_ROOM, *PASSING_PROGRESS)).encode()) == 1720224807


def test_a_report_and_its_updates_reserve_the_same_memory() -> None:
    """A connection that has room for its first report has room for all updates of it."""
    writer, decoder = ReportWriter(updates=True), ReportDecoder()
    decoder.decode(writer.text(FIRST))
    before = decoder.retained_bytes
    ranks = tuple(replace(each, step=1 << 60, loss="x" * MAX_PASSING_TEXT) for each in FIRST.progress)
    text = writer.text(replace(FIRST, sequence=2, progress=ranks))
    assert text.startswith(report_updates.BEGINNING)
    decoder.decode(text)
    assert decoder.retained_bytes == before
