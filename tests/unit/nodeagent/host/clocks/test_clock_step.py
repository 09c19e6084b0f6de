from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.host.wall_clock import offset_change, read_clocks, wall_offset

TIME = st.floats(0, 4e9)


def test_setting_the_clock_is_a_step_by_the_difference() -> None:
    before, after = wall_offset([(10.0, 1000.0, 10.0)]), wall_offset([(25.0, 1012.5, 25.0)])
    assert after is not None
    assert offset_change(before, after) == 2.5
    assert offset_change(None, after) == 0.0


def test_time_that_passes_between_two_readings_is_not_a_step() -> None:
    before, after = wall_offset([(10.0, 1000.0, 10.0)]), wall_offset([(9010.0, 10000.0, 9010.0)])
    assert after is not None
    assert offset_change(before, after) == 0.0


def test_the_fastest_sample_counts_and_slow_ones_alone_have_no_result() -> None:
    slow, fast = (10.0, 1000.0, 14.0), (20.0, 1010.0, 20.00001)
    found = wall_offset([slow, fast])
    assert found is not None
    assert abs(found - 990.0) < 1e-4
    assert wall_offset([slow]) is None
    assert wall_offset([]) is None


def test_the_real_clocks_do_not_jump_between_two_readings() -> None:
    before, after = wall_offset(read_clocks()), wall_offset(read_clocks())
    assert before is not None
    assert after is not None
    assert offset_change(before, after) < 0.01


@given(st.lists(st.tuples(TIME, TIME, TIME), max_size=5))
def test_no_samples_raise_an_exception(samples: list[tuple[float, float, float]]) -> None:
    found = wall_offset(samples)
    assert found is None or isinstance(found, float)
