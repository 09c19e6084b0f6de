from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sensing.sweep import Periods

STEP_S = 5.0


def test_all_checks_are_due_at_first_and_then_at_their_own_periods() -> None:
    periods = Periods({"fast": 5, "slow": 15}, ("fast", "slow"), STEP_S)
    due = [sorted(periods.due(5.0 * n)) for n in range(4)]
    assert due == [["fast", "slow"], ["fast"], ["fast"], ["fast", "slow"]]


def test_a_slightly_early_step_does_not_skip_a_period() -> None:
    periods = Periods({"slow": 15}, ("slow",), STEP_S)
    assert periods.due(0.0)
    assert periods.due(14.9)


def test_a_check_without_a_period_or_unknown_is_never_due() -> None:
    periods = Periods({"off": 0, "other": 5}, ("off", "without"), STEP_S)
    assert periods.due(0.0) == frozenset()
    assert periods.checks == frozenset()


@given(st.floats(1, 600), st.lists(st.floats(0.1, 30), min_size=1, max_size=50))
def test_no_check_is_read_much_more_often_than_its_period(period_s: float, steps: list[float]) -> None:
    periods, now_s, last_s = Periods({"it": period_s}, ("it",), STEP_S), 0.0, float("-inf")
    for step in steps:
        now_s += step
        if periods.due(now_s):
            assert now_s - last_s >= period_s - STEP_S / 2 - 1e-6
            last_s = now_s
        else:
            assert now_s - last_s < period_s
