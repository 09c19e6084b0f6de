"""Ticks of the clock, and its identity."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.clock import LEAST, seconds_to_next_tick

PERIODS = st.sampled_from([0.5, 1.0, 5.0, 30.0])


@given(PERIODS, st.floats(0.0, 1e7))
def test_a_wait_ends_at_a_tick_and_is_neither_empty_nor_much_longer_than_a_period(
    period_s: float, now_s: float
) -> None:
    wait_s = seconds_to_next_tick(period_s, now_s)
    assert LEAST * period_s < wait_s <= (1 + LEAST) * period_s + 1e-6
    off_s = (now_s + wait_s) % period_s
    assert min(off_s, period_s - off_s) < 1e-6


@given(PERIODS, st.floats(0.0, 1e7), st.floats(0.0, 0.05))
def test_a_thread_that_wakes_up_a_little_early_waits_for_the_tick_after_the_next(
    period_s: float, now_s: float, early: float
) -> None:
    beat_s = now_s + seconds_to_next_tick(period_s, now_s)
    assert seconds_to_next_tick(period_s, beat_s - early * period_s) > 0.9 * period_s


def test_the_clock_of_the_ticks_is_the_monotonic_one() -> None:
    assert time.monotonic() % 1.0 + seconds_to_next_tick(1.0) == pytest.approx(1.0, abs=1.0)
    assert seconds_to_next_tick(0.0) == 0.0
