"""Reports of one connection are decoded with the same result as if each were decoded in full."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import (
    HeldPrivateState,
    HeldSnapshot,
    KnownHistory,
    MemberReport,
    StorageListing,
)
from supervisor.controller.reports.report_decoder import PARTS, ReportDecoder
from tests.unit.supervisor.job_views import launcher, progress, rank, report

FIRST = report("m0", launcher(rank(0)), progress=(progress(0, 7),), slots=(HeldSnapshot(1, 4, 8),))
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"sequence": 2, "now_ns": 5},
    {"progress": (progress(0, 8),)},
    {"launcher": None},
    {"launcher": launcher(rank(0, Ending(5, 1, message='Traceback: ,"peer_url":,"stalls":{}')))},
    {"privates": (HeldPrivateState(0, 1, 7, True),)},
    {"notes": ('a note with ,"launcher_silent":"x"',)},
    {"peer_url": ',"launcher":null,"peer_url":'},
    {"epoch": 3, "told": KnownHistory(2)},
    {"storage": StorageListing(4)},
    {"prepare_error": "ünï\u2028}"},
)


def text_of(message: MemberReport) -> str:
    return codec.encode(message).decode()


@given(st.lists(st.sampled_from(CHANGES), max_size=8))
@settings(max_examples=60)
def test_every_report_of_a_sequence_is_decoded_as_if_it_were_the_only_one(
    changes: list[dict[str, Any]],
) -> None:
    decoder, sent = ReportDecoder(), FIRST
    for change in changes:
        sent = replace(sent, **change)
        assert decoder.decode(text_of(sent)) == sent


def test_a_repeated_part_is_decoded_to_the_same_object() -> None:
    decoder = ReportDecoder()
    first = decoder.decode(text_of(FIRST))
    again = decoder.decode(text_of(replace(FIRST, sequence=2)))
    assert again.launcher is first.launcher
    assert again.slots is first.slots
    assert again.sequence == 2


def test_a_report_in_another_form_is_decoded_all_the_same() -> None:
    decoder = ReportDecoder()
    decoder.decode(text_of(FIRST))
    found = json.loads(text_of(FIRST))
    for text in (json.dumps(found), json.dumps(dict(reversed(found.items())), separators=(",", ":"))):
        assert decoder.decode(text) == FIRST
    assert decoder.decode(text_of(FIRST)) == FIRST


@pytest.mark.parametrize("name", [each.name for each in fields(MemberReport)])
def test_a_wrong_field_is_refused_by_name_after_a_good_report_too(name: str) -> None:
    decoder = ReportDecoder()
    decoder.decode(text_of(FIRST))
    found = json.loads(text_of(FIRST)) | {name: {"wrong": 1}}
    wrong = json.dumps(found, separators=(",", ":"))
    with pytest.raises(codec.InvalidMessage) as refused:
        decoder.decode(wrong)
    with pytest.raises(codec.InvalidMessage) as alone:
        codec.decode(MemberReport, wrong)
    assert str(refused.value) == str(alone.value)
    assert decoder.decode(text_of(FIRST)) == FIRST


def test_a_known_part_in_the_wrong_field_is_refused() -> None:
    """The text of the part is known from the last report, but here it is in another place."""
    decoder, text = ReportDecoder(), text_of(FIRST)
    decoder.decode(text)
    start, end = text.index(',"launcher":'), text.index(',"peer_url":')
    part = text[start:end]
    moved = text.replace(part, "", 1).replace('"durable":{', '"durable":{"step":1' + part + ",", 1)
    with pytest.raises(codec.InvalidMessage):
        decoder.decode(moved)


def test_the_table_of_parts_follows_the_order_of_the_fields() -> None:
    names = [each.name for each in fields(MemberReport)]
    marks = [names.index(each) for part in PARTS for each in (part.first, part.end) if each]
    assert marks == sorted(marks)
    assert {"sequence", "now_ns", "progress", "room"}.isdisjoint(n for part in PARTS for n in part.names)
