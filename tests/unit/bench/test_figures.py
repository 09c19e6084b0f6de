from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import percentile, ratio, slope, summary

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def test_a_summary_names_median_p90_and_both_ends() -> None:
    found = summary([float(value) for value in range(1, 11)])
    assert (found.count, found.median, found.p90, found.worst, found.best) == (10, 5.5, 9, 10, 1)
    assert found.mean == 5.5


def test_nothing_has_no_median() -> None:
    found = summary([])
    assert found.count == 0
    assert math.isnan(found.median)
    assert math.isnan(found.worst)


@given(SAMPLES, st.floats(0, 100))
def test_a_percentile_is_a_value_that_occurred_and_covers_that_many(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values)


@given(SAMPLES)
def test_the_figures_are_in_order(values: list[float]) -> None:
    found = summary(values)
    assert found.best <= found.median <= found.p90 <= found.worst or len(values) < 3


def test_a_ratio_with_nothing_below_is_not_known() -> None:
    assert math.isnan(ratio(1.0, 0.0))
    assert ratio(1.0, 4.0) == 0.25


@given(st.floats(-100, 100), st.floats(-100, 100))
def test_the_slope_of_a_line_is_its_own(a: float, b: float) -> None:
    assert slope([(x, a * x + b) for x in range(10)]) == pytest.approx(a, abs=1e-6)


def test_one_place_has_no_slope() -> None:
    assert slope([]) == 0.0
    assert slope([(1.0, 2.0), (1.0, 3.0)]) == 0.0
