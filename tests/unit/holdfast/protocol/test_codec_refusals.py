"""The complete message of each refusal, and the largest values that are accepted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from holdfast.protocol import codec


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Whole:
    number: int
    ratio: float = 0.0
    text: str = ""
    flag: bool = False
    maybe: int | None = None
    pair: tuple[int, str] = (0, "")
    many: tuple[int, ...] = ()
    table: Mapping[str, int] | None = None
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    word: Literal["a", "b"] = "a"
    anything: Any = None


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (3, "Whole: 3 is not an object"),
        ({}, "Whole.number: missing"),
        ({"number": "1"}, "Whole.number: '1' is not int"),
        ({"number": True}, "Whole.number: True is not int"),
        ({"number": 1.0}, "Whole.number: 1.0 is not int"),
        ({"number": 1 << 64}, "Whole.number: out of range"),
        ({"number": -(1 << 63) - 1}, "Whole.number: out of range"),
        ({"number": "x" * 58}, "Whole.number: '" + "x" * 58 + "' is not int"),
        ({"number": "x" * 59}, "Whole.number: '" + "x" * 56 + "... is not int"),
        ({"number": 1, "ratio": "x"}, "Whole.ratio: 'x' is not float"),
        ({"number": 1, "ratio": 10**309}, "Whole.ratio: 1" + "0" * 56 + "... is not a finite number"),
        ({"number": 1, "text": None}, "Whole.text: None is not str"),
        ({"number": 1, "flag": 1}, "Whole.flag: 1 is not bool"),
        ({"number": 1, "maybe": "x"}, "Whole.maybe: 'x' is not int"),
        ({"number": 1, "pair": [1]}, "Whole.pair: 1 items, expected 2"),
        ({"number": 1, "pair": [1, 2]}, "Whole.pair[1]: 2 is not str"),
        ({"number": 1, "many": "x"}, "Whole.many: 'x' is not a list of at most 16384"),
        ({"number": 1, "many": [0, "x"]}, "Whole.many[1]: 'x' is not int"),
        ({"number": 1, "table": [1]}, "Whole.table: [1] is not an object"),
        ({"number": 1, "table": {"k": "x"}}, "Whole.table.'k': 'x' is not int"),
        ({"number": 1, "part": {}}, "Whole.part.size: missing"),
        ({"number": 1, "part": 3}, "Whole.part: 3 is not an object"),
        ({"number": 1, "parts": [{"size": 1}, {"size": "x"}]}, "Whole.parts[1].size: 'x' is not int"),
        ({"number": 1, "parts": [{"later": 1}]}, "Whole.parts[0].'later': unknown field"),
        ({"number": 1, "later": 1}, "Whole.'later': unknown field"),
        ({"number": 1, "word": 3}, "Whole.word: 3 is not str"),
        ({"number": 1, "text": [0] * 99}, "Whole.text: [" + "0, " * 18 + "0,... is not str"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(found: object, why: str) -> None:
    with pytest.raises(codec.InvalidMessage) as caught:
        codec.decode(Whole, json.dumps(found))
    assert str(caught.value) == why


def test_a_message_of_all_kinds_of_fields_is_read() -> None:
    found = {
        "number": -(1 << 63),
        "ratio": 3,
        "text": "t",
        "flag": True,
        "maybe": (1 << 64) - 1,
        "pair": [1, "x"],
        "many": [1, 2],
        "table": {"k": 5},
        "part": {"size": 6},
        "parts": [{"size": 7}],
        "word": "a word of a later version",
        "anything": {"x": [None]},
    }
    expected = Whole(
        -(1 << 63), 3.0, "t", True, (1 << 64) - 1, (1, "x"), (1, 2), {"k": 5}, Part(6), (Part(7),),
        "a word of a later version", {"x": [None]},  # type: ignore[arg-type]  # it may send one
    )  # fmt: skip
    assert codec.decode(Whole, json.dumps(found)) == expected
    assert codec.decode(Whole, codec.encode(expected)) == expected
    assert codec.encode(expected).startswith(
        b'{"number":-9223372036854775808,"ratio":3.0,"text":"t","flag":true,"maybe":18446744073709551615,'
    )
    assert codec.encode(Part(6)) == b'{"size":6}\n'
    assert codec.decode(Whole, '{"number":1,"maybe":null,"part":null}') == Whole(1)


def test_unknown_fields_are_ignored_at_any_depth_only_where_that_is_asked_for() -> None:
    found = {
        "number": 1,
        "later": 2,
        "part": {"size": 1, "later": 2},
        "parts": [{"size": 3, "later": 4}],
    }
    assert codec.from_json(Whole, found, lenient=True) == Whole(1, part=Part(1), parts=(Part(3),))
    with pytest.raises(codec.InvalidMessage) as caught:
        codec.from_json(Whole, {"number": 1, "part": {"later": 1}}, "line 3")
    assert str(caught.value) == "line 3.part.'later': unknown field"
    with pytest.raises(codec.InvalidMessage) as caught:
        codec.from_json(Whole, {"number": 1, "maybe": "x"}, "line 3", lenient=True)
    assert str(caught.value) == "line 3.maybe: 'x' is not int"


def test_the_largest_message_text_and_list_are_accepted_and_larger_ones_are_refused() -> None:
    most = codec.MAX_MESSAGE_BYTES
    line = '{"number":1}'
    assert codec.decode(Whole, line.ljust(most)) == Whole(1)
    assert refusal(line.ljust(most + 1)) == f"Whole: {most + 1} bytes; the limit is {most}"
    text = "x" * codec.MAX_TEXT
    assert codec.decode(Whole, json.dumps({"number": 1, "text": text})) == Whole(1, text=text)
    assert refusal(json.dumps({"number": 1, "text": text + "x"})) == (
        "Whole.text: a text of 1048577 characters; the limit is 1048576"
    )
    many = (0,) * codec.MAX_ITEMS
    assert codec.decode(Whole, json.dumps({"number": 1, "many": many})) == Whole(1, many=many)
    table = {str(n): n for n in range(codec.MAX_ITEMS)}
    assert codec.decode(Whole, json.dumps({"number": 1, "table": table})) == Whole(1, table=table)
    assert refusal(json.dumps({"number": 1, "table": {**table, "x": 1}})).endswith(" is not an object")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Whole: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("", "Whole: not JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_line_that_is_not_json_is_refused_with_the_reason(line: str, why: str) -> None:
    assert refusal(line) == why


def refusal(line: str) -> str:
    with pytest.raises(codec.InvalidMessage) as caught:
        codec.decode(Whole, line)
    return str(caught.value)


@dataclass(frozen=True)
class Timed:
    waited_s: float
    seconds: float = 0.0
    flops: float = 0.0


def test_seconds_are_limited_to_what_a_wall_clock_shows() -> None:
    assert (
        codec.decode(Timed, json.dumps({"waited_s": time.time(), "seconds": -1.0, "flops": 1e300})).flops
        == 1e300
    )
    for name in ("waited_s", "seconds"):
        with pytest.raises(codec.InvalidMessage, match=rf"Timed\.{name}: 1e\+16 s; the limit is 1e\+10 s"):
            codec.decode(Timed, json.dumps({"waited_s": 0.0, name: 1e16}))
