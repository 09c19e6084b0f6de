from __future__ import annotations

import pytest

from nodeagent.kernel.kmsg import read_clocks, stamp_to_monotonic


def test_a_stamp_is_corrected_by_the_slew_of_ntp() -> None:
    day_s = 86400.0
    slewed = 30 * day_s * 1.00005  # 50 ppm: 130 s in a month
    assert stamp_to_monotonic(30 * day_s, slewed, 30 * day_s) == pytest.approx(slewed)
    assert stamp_to_monotonic(15 * day_s, slewed, 30 * day_s) == pytest.approx(slewed / 2)


def test_no_stamp_is_later_than_now() -> None:
    assert stamp_to_monotonic(101.0, 100.0, 100.0) == 100.0


def test_without_the_other_clock_a_stamp_is_unchanged() -> None:
    assert stamp_to_monotonic(5.0, 100.0, 0.0) == 5.0


def test_both_clocks_of_this_machine_count_from_this_boot() -> None:
    monotonic, raw = read_clocks()
    assert monotonic == pytest.approx(raw, rel=0.01, abs=5.0)
