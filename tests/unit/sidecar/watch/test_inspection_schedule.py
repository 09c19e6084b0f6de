from __future__ import annotations

from itertools import pairwise

import pytest

from sidecar.watch.inspection_schedule import ANSWER_S, FIRST_S, LAST_S, InspectionSchedule


def test_inspections_follow_one_another_at_growing_gaps() -> None:
    schedule, now_s, gaps, answered = InspectionSchedule(), 0.0, [], 0
    for _ in range(12):
        while not (number := schedule.advance(True, answered, now_s)):
            now_s += 0.01
        gaps.append(now_s)
        now_s += 0.2  # the inspection itself
        assert schedule.advance(True, answered, now_s) == 0
        answered = number
        assert schedule.advance(True, answered, now_s) == 0
    apart = [after - before - 0.2 for before, after in pairwise(gaps)]
    assert apart[0] < FIRST_S + 0.05
    assert all(after >= before - 0.05 for before, after in pairwise(apart))
    assert LAST_S - 0.05 < apart[-1] < LAST_S + 0.05


def test_an_inspection_that_a_proof_needs_is_made_at_once_while_gaps_are_short() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0, 1) == 1
    assert schedule.advance(True, 0, 0.1, 77) == 0, "the first is not answered yet"
    assert schedule.advance(True, 1, 0.2, 77) == 2
    assert schedule.advance(True, 2, 0.4, 77) == 0, "an inspection of that id was already requested"
    taken, now_s = 2, 0.4
    for inspection_id in range(100, 200):  # ranks that move between all inspections have a new id each time
        now_s += 0.1
        taken = schedule.advance(True, taken, now_s, inspection_id) or taken
    assert taken < 15


def test_a_lost_inspection_is_requested_again_and_numbers_never_decrease() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 41, 0.0) == 42, "another sidecar asked earlier"
    assert schedule.advance(True, 41, ANSWER_S - 0.1) == 0
    assert schedule.advance(True, 41, ANSWER_S) == 43


def test_once_no_rank_is_late_the_next_stall_is_inspected_at_once() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0) == 1
    assert schedule.advance(False, 1, 0.5) == 0
    assert schedule.advance(True, 1, 0.51) == 2


def test_each_gap_is_half_as_long_again_and_counts_from_the_result() -> None:
    schedule, now_s, waits = InspectionSchedule(), 100.0, []
    assert schedule.advance(True, 0, now_s) == 1
    for number in range(1, 12):
        now_s += 2.0
        waited_s = 0.0
        while schedule.advance(True, number, now_s + waited_s) == 0:
            waited_s += 1 / 1024
        waits.append(waited_s)
        now_s += waited_s
    exact = [0.25, 0.375, 0.5625, 0.84375, 1.265625, 1.8984375, 2.84765625, 4.271484375, 5.0, 5.0, 5.0]
    assert waits == [pytest.approx(each, abs=1 / 1024) for each in exact]
    assert waits[:4] == exact[:4], "an inspection is due at the end of the gap, not after it"


def test_a_late_result_counts_from_its_arrival_and_a_repeated_one_does_not_count_again() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0) == 1
    assert schedule.advance(True, 0, 9.0) == 0
    assert schedule.advance(True, 1, 9.5) == 0
    assert schedule.advance(True, 1, 9.625) == 0
    assert schedule.advance(True, 1, 9.75) == 2
    assert schedule.advance(True, 1, 19.5) == 0, "the second has no result"
    assert schedule.advance(True, 1, 19.75) == 3


@pytest.mark.parametrize(("gaps", "taken_at_once"), [(0, True), (3, True), (4, False), (6, False)])
def test_a_proof_is_taken_at_once_only_while_gaps_are_shorter_than_a_second(
    gaps: int, taken_at_once: bool
) -> None:
    schedule, now_s = InspectionSchedule(), 0.0
    assert schedule.advance(True, 0, now_s, 7) == 1
    for number in range(1, gaps + 1):
        schedule.advance(True, number, now_s + 1.0, 7)
        now_s += 100.0
        assert schedule.advance(True, number, now_s, 7) == number + 1
    assert schedule.advance(True, gaps + 1, now_s + 0.1, 8) == (gaps + 2 if taken_at_once else 0)


def test_after_a_time_without_late_ranks_the_gaps_start_over() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0) == 1
    assert schedule.advance(True, 1, 1.0) == 0
    assert schedule.advance(True, 1, 1.25) == 2
    assert schedule.advance(False, 2, 2.0) == 0
    assert schedule.advance(True, 2, 2.0) == 3
    assert schedule.advance(True, 3, 2.5) == 0
    assert schedule.advance(True, 3, 2.74) == 0
    assert schedule.advance(True, 3, 2.75) == 4


def test_without_an_id_from_the_supervisor_no_proof_is_requested() -> None:
    schedule = InspectionSchedule()
    assert schedule.advance(True, 0, 0.0) == 1
    assert schedule.advance(True, 1, 0.1, 0) == 0
