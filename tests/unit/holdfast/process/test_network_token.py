"""The token in an Authorization header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.network import bearer_token


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("BEARER a.b.c", "a.b.c"),
        ("", ""),
        ("Bearer", ""),
        ("Bearer ", ""),
        ("Basic abc", ""),
        ("abc", ""),
        (" Bearer abc", ""),
    ],
)
def test_only_a_bearer_header_has_a_token(header: str, token: str) -> None:
    assert bearer_token(header) == token


@given(st.text())
def test_any_header_has_a_token_or_none(header: str) -> None:
    assert bearer_token(header) in header
    assert bearer_token(f"Bearer {header}") == header.strip()
