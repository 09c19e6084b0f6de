from __future__ import annotations

import math

import pytest

from bench.table import number, percent, seconds, size, table


def test_columns_line_up_with_names_to_the_left_and_numbers_to_the_right() -> None:
    assert table(("who", "n"), [("me", "10"), ("another", "5")]).splitlines() == [
        "who       n",
        "-------  --",
        "me       10",
        "another   5",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, "1.500 s"),
        (0.104, "0.104 s"),
        (0.012, "12 ms"),
        (1.5e-6, "1.5 us"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_times_are_shown_in_a_unit_that_fits(value: float | None, expected: str) -> None:
    assert seconds(value) == expected


def test_what_is_not_known_is_a_dash() -> None:
    assert number(math.nan) == "-"
    assert percent(math.nan) == "-"


def test_sizes_are_decimal() -> None:
    assert [size(value) for value in (10, 1_500, 2_000_000, 1.024e9)] == [
        "10 B", "1.5 kB", "2 MB", "1.02 GB",
    ]  # fmt: skip
    assert size(-5e6) == "-5 MB"
    assert [size(value) for value in (999.4e6, 999.6e6, 999_950)] == ["999 MB", "1 GB", "1 MB"]
    assert percent(0.0123) == "1.23%"
