from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.fileio.strict_json import RejectedJson, brief, loads

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_json_that_the_writer_wrote_is_read(value: object) -> None:
    assert loads(json.dumps(value).encode(), max_values=1000) == value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff", "is not UTF-8 at byte 0"),
        (b"{", "is not JSON: .* at character 1"),
        (b"", "is not JSON"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b'{"a":1,"a":2}', "has the name 'a' twice"),
        (b"[NaN]", "has NaN, which is not JSON"),
        (b"[" + b"9" * 21 + b"]", "has an integer of 21 digits; the limit is 20"),
        (b"[" * 900_000, "is nested too deeply"),
        (b"[" + b"1," * 1_000_000 + b"1]", "has more than 1000000 values"),
    ],
)
def test_anything_but_plain_json_is_refused_in_one_line(data: bytes, why: str) -> None:
    with pytest.raises(RejectedJson, match=why) as caught:
        loads(data, max_values=1_000_000)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(RejectedJson):
        found = loads(data, max_values=1000)
        assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", r"'a\nb'"),
        ("\ud800", r"'\ud800'"),
        ("x" * 80, f"'{'x' * 80}'"),
        ("x" * 81, f"'{'x' * 80}'..."),
        ("x" * 200, f"'{'x' * 80}'..."),
        (0.5, "0.5"),
        ({}, "a dict"),
        (3, "3"),
        (True, "True"),
        (None, "None"),
        ([1], "a list"),
    ],
)
def test_a_value_in_a_message_is_short_and_printable(value: object, text: str) -> None:
    assert brief(value) == text


def test_the_largest_accepted_value_is_read_and_the_next_is_refused_in_these_words() -> None:
    assert loads(b"[" + b"9" * 20 + b"]", max_values=1) == [10**20 - 1]
    assert loads(b"[-" + b"9" * 19 + b"]", max_values=1) == [1 - 10**19]
    assert loads(b'[1,{"a":[]}]', max_values=4) == [1, {"a": []}]
    assert refusal(b'[1,{"a":[]}]', 3) == "has more than 3 values"
    assert refusal(b"[-" + b"9" * 20 + b"]") == "has an integer of 21 digits; the limit is 20"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'"ab\xff"', "is not UTF-8 at byte 3"),
        (b"[1 2]", "is not JSON: Expecting ',' delimiter at character 3"),
        (b'{"a":1,"b":2,"b":3}', "has the name 'b' twice"),
        (b"[-Infinity]", "has -Infinity, which is not JSON"),
        (b"[" * 900_000, "is nested too deeply"),
    ],
)
def test_a_refusal_states_the_whole_reason(data: bytes, why: str) -> None:
    assert refusal(data) == why


def refusal(data: bytes, max_values: int = 1_000_000) -> str:
    with pytest.raises(RejectedJson) as caught:
        loads(data, max_values=max_values)
    return str(caught.value)
