"""A pace lengthens short steps to the requested time, and lengthens no others."""

from __future__ import annotations

import pytest

from trainer.pace import Pace


def test_short_steps_take_the_requested_time_and_long_ones_take_no_longer() -> None:
    pace, now_s, ends = Pace(0.1), 7.0, []
    for work_s in (0.01, 0.02, 0.3, 0.05):
        now_s += work_s
        now_s += pace.left_s(now_s)
        ends.append(now_s)
    assert ends == pytest.approx([7.01, 7.11, 7.41, 7.51])


def test_without_a_pace_there_is_no_wait() -> None:
    pace = Pace(0.0)
    assert [pace.left_s(now_s) for now_s in (1.0, 1.0, 2.0)] == [0.0, 0.0, 0.0]
