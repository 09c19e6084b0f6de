"""What follows from the lines of ranks, whatever their order and however late they arrive."""

from __future__ import annotations

import pytest

from bench.cluster.nodes import training_record
from bench.cluster.nodes.training_record import PrintedDigest, PrintedStep, parse

HASH = "0" * 63 + "a"


def ticks(*given: tuple[float, int, int, int]) -> list[PrintedStep]:
    return [PrintedStep(*each) for each in given]


def test_steps_and_digests_are_parsed_and_other_lines_are_not() -> None:
    assert parse("tick 12 rank 1 generation 3\n", 5.0) == PrintedStep(5.0, 12, 1, 3)
    assert parse(f"digest 49 {HASH}", 5.0) == PrintedDigest(49, HASH)
    for line in ("", "tick 12 rank 1", "a tick 12 rank 1 generation 3", f"digest 49 {HASH}0", "holdfast: x"):
        assert parse(line, 5.0) is None


def test_a_group_has_resumed_once_its_last_rank_has_completed_a_step_of_a_new_generation() -> None:
    found = ticks((1.0, 5, 0, 1), (1.1, 5, 1, 1), (4.0, 6, 0, 2), (4.5, 6, 1, 2), (4.6, 7, 0, 2))
    assert training_record.resumed_s(found[:3], 1, 2) is None
    assert training_record.resumed_s(found, 1, 2) == 4.5
    assert training_record.resumed_s(found, 2, 2) is None
    assert training_record.newest_generation(found) == 2
    assert training_record.newest_generation([]) == 0


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([(1, 5, 0, 1), (1, 5, 1, 1), (4, 6, 0, 2)], 0),
        ([(1, 5, 0, 1), (1, 4, 1, 1), (4, 5, 0, 2), (5, 6, 0, 2)], 1),
        ([(1, 5, 0, 1), (4, 3, 0, 2), (5, 4, 0, 3)], 3),
        ([(1, 5, 0, 1)], 0),  # it has not resumed
        ([(4, 7, 0, 2), (9, 8, 0, 1)], 2),  # the late lines of a member that was cut off
        ([], 0),
    ],
)
def test_steps_that_are_completed_again_are_lost(steps: list[tuple[int, int, int, int]], lost: int) -> None:
    assert training_record.steps_lost(ticks(*steps), 1) == lost


def test_the_longest_pause_ends_with_a_new_step_or_has_not_ended_yet() -> None:
    found = ticks((1.0, 1, 0, 1), (2.0, 2, 0, 1), (3.0, 2, 1, 1), (6.0, 2, 0, 2), (7.0, 3, 0, 2))
    assert training_record.longest_pause_s(found, 2.5, 7.5) == 5.0  # a repeated step is not new
    assert training_record.longest_pause_s(found, 0.5, 2.0) == 1.0
    assert training_record.longest_pause_s(found, 2.5, 6.5) == 4.5
    assert training_record.longest_pause_s(found, 7.5, 17.5) == 10.5
    assert training_record.longest_pause_s([], 1.0, 4.0) == 3.0


def test_digests_are_compared_at_the_steps_of_both_runs() -> None:
    found = [PrintedDigest(49, "a"), PrintedDigest(49, "b"), PrintedDigest(99, "c"), PrintedDigest(149, "d")]
    assert training_record.differing_digests(found, {49: "a", 99: "c"}) == [49]
    assert training_record.compared(found, {49: "a", 99: "c", 199: "e"}) == 2
    assert training_record.differing_digests(found[2:], {99: "c"}) == []
