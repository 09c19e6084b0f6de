from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.text import (
    Verdict,
    all_met,
    at_most,
    below,
    number,
    percent,
    percentile,
    ratio,
    seconds,
    size,
    slope,
    summary,
    table,
)


def test_names_are_left_aligned_and_numbers_right_aligned() -> None:
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
def test_times_are_shown_in_a_suitable_unit(value: float | None, expected: str) -> None:
    assert seconds(value) == expected


def test_an_unknown_time_is_a_dash() -> None:
    assert number(math.nan) == "-"
    assert percent(math.nan) == "-"


def test_sizes_are_decimal() -> None:
    assert [size(value) for value in (10, 1_500, 2_000_000, 1.024e9)] == [
        "10 B", "1.5 kB", "2 MB", "1.02 GB",
    ]  # fmt: skip
    assert size(-5e6) == "-5 MB"
    assert [size(value) for value in (999.4e6, 999.6e6, 999_950)] == ["999 MB", "1 GB", "1 MB"]
    assert percent(0.0123) == "1.23%"


SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def test_a_summary_contains_median_p90_minimum_and_maximum() -> None:
    found = summary([float(value) for value in range(1, 11)])
    assert (found.count, found.median, found.p90, found.worst, found.best) == (10, 5.5, 9, 10, 1)
    assert found.mean == 5.5


def test_an_empty_sample_has_no_median() -> None:
    found = summary([])
    assert found.count == 0
    assert math.isnan(found.median)
    assert math.isnan(found.worst)


@given(SAMPLES, st.floats(0, 100))
def test_a_percentile_is_a_value_of_the_sample_that_covers_its_share(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values)


@given(SAMPLES)
def test_the_figures_of_a_summary_are_in_ascending_order(values: list[float]) -> None:
    found = summary(values)
    assert found.best <= found.median <= found.p90 <= found.worst or len(values) < 3


def test_a_ratio_to_zero_is_nan() -> None:
    assert math.isnan(ratio(1.0, 0.0))
    assert ratio(1.0, 4.0) == 0.25


@given(st.floats(-100, 100), st.floats(-100, 100))
def test_the_slope_of_points_on_a_line_is_the_slope_of_the_line(a: float, b: float) -> None:
    assert slope([(x, a * x + b) for x in range(10)]) == pytest.approx(a, abs=1e-6)


def test_points_with_equal_x_have_no_slope() -> None:
    assert slope([]) == 0.0
    assert slope([(1.0, 2.0), (1.0, 3.0)]) == 0.0


def test_at_most_allows_the_limit_and_below_does_not() -> None:
    assert at_most("t", 0.3, 0.3, "").met is True
    assert at_most("t", 0.31, 0.3, "").met is False
    assert below("t", 0.3, 0.3, "").met is False
    assert below("t", 0.29, 0.3, "").met is True


def test_a_missing_measurement_is_neither_met_nor_missed() -> None:
    assert at_most("t", math.nan, 1, "").met is None
    assert below("t", math.nan, 1, "").met is None
    assert all_met([Verdict("a", "", None), Verdict("b", "", True)])


def test_a_missed_target_is_printed_in_capitals() -> None:
    missed = Verdict("median <= 0.3 s", "0.400 s", False)
    assert missed.line == "MISSED  median <= 0.3 s: 0.400 s"
    assert not all_met([missed])
