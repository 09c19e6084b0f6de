from __future__ import annotations

from itertools import pairwise

from sidecar.watch.inspection_schedule import ANSWER_S, FIRST_S, LAST_S, InspectionSchedule


def test_looks_come_one_after_the_other_and_ever_more_seldom() -> None:
    schedule, now_s, gaps, answered = InspectionSchedule(), 0.0, [], 0
    for _ in range(12):
        while not (number := schedule.advance(True, answered, now_s)):
            now_s += 0.01
        gaps.append(now_s)
        now_s += 0.2  # the look itself
        assert schedule.advance(True, answered, now_s) == 0
        answered = number
        assert schedule.advance(True, answered, now_s) == 0
    apart = [after - before - 0.2 for before, after in pairwise(gaps)]
    assert apart[0] < FIRST_S + 0.05
    assert all(after >= before - 0.05 for before, after in pairwise(apart))
    assert LAST_S - 0.05 < apart[-1] < LAST_S + 0.05


def test_a_look_that_a_proof_needs_is_taken_at_once_while_looks_are_dense() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0, 1) == 1
    assert schedule.advance(True, 0, 0.1, 77) == 0, "the first is not answered yet"
    assert schedule.advance(True, 1, 0.2, 77) == 2
    assert schedule.advance(True, 2, 0.4, 77) == 0, "it was asked with that moment"
    taken, now_s = 2, 0.4
    for moment in range(100, 200):  # ranks that move between all looks have a new moment each time
        now_s += 0.1
        taken = schedule.advance(True, taken, now_s, moment) or taken
    assert taken < 15


def test_a_look_that_is_lost_is_asked_for_again_and_numbers_never_fall() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 41, 0.0) == 42, "another sidecar has asked before"
    assert schedule.advance(True, 41, ANSWER_S - 0.1) == 0
    assert schedule.advance(True, 41, ANSWER_S) == 43


def test_when_nobody_is_late_any_more_the_next_stall_is_looked_at_at_once() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0) == 1
    assert schedule.advance(False, 1, 0.5) == 0
    assert schedule.advance(True, 1, 0.51) == 2
