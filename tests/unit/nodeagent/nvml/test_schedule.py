from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.nvml.schedule import EARLY_S, Schedule


def test_all_is_due_at_first_and_then_at_its_period() -> None:
    schedule = Schedule({"often": 5.0, "seldom": 15.0})
    found = [schedule.due(100.0 + 5.0 * sweep) for sweep in range(7)]
    both, one = {"often", "seldom"}, {"often"}
    assert found == [both, one, one, both, one, one, both]


def test_missed_sweeps_are_not_caught_up_with() -> None:
    schedule = Schedule({"often": 5.0})
    schedule.due(0.0)
    assert schedule.due(1000.0)
    assert not schedule.due(1002.0)


@given(st.floats(1.5, 100.0), st.lists(st.floats(-0.4, 0.4), min_size=20, max_size=60))
def test_sweeps_that_come_a_little_early_or_late_lose_none(period_s: float, shifts_s: list[float]) -> None:
    schedule = Schedule({"check": period_s})
    assert EARLY_S >= 0.8
    assert all(schedule.due(1000.0 + n * period_s + shift_s) for n, shift_s in enumerate(shifts_s))
