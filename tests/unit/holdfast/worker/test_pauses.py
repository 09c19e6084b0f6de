from __future__ import annotations

from holdfast.worker import pauses
from holdfast.worker.pauses import MAX_FIRST_COPY_S, MIN_PAUSE_PER_COPY, PauseHistory

COPY_S = 0.1


def paused(pauses: PauseHistory, label: str, lasts_s: float, writes: bool) -> None:
    pauses.began(label, 50.0)
    if writes:
        pauses.writes()
    pauses.ended(50.0 + lasts_s)


def test_the_first_pause_with_a_label_is_copied_unless_the_copy_takes_long() -> None:
    pauses = PauseHistory()
    assert pauses.wants_copy("eval", COPY_S)
    assert not pauses.wants_copy("eval", MAX_FIRST_COPY_S * 2)


def test_a_pause_that_only_reads_needs_no_copy() -> None:
    pauses = PauseHistory()
    paused(pauses, "eval", 60.0, writes=False)
    assert not pauses.wants_copy("eval", COPY_S)
    assert pauses.wants_copy("other", COPY_S)


def test_a_pause_that_wrote_once_is_always_copied_if_it_lasts_long_enough() -> None:
    pauses = PauseHistory()
    paused(pauses, "eval", COPY_S * MIN_PAUSE_PER_COPY * 2, writes=True)
    paused(pauses, "eval", COPY_S, writes=False)
    assert pauses.wants_copy("eval", COPY_S)
    paused(pauses, "short", COPY_S, writes=True)
    assert not pauses.wants_copy("short", COPY_S)


def test_a_write_is_known_only_for_the_present_pause() -> None:
    pauses = PauseHistory()
    pauses.began("eval", 0.0)
    assert not pauses.known
    pauses.writes()
    assert pauses.known
    pauses.ended(1.0)
    pauses.began("eval", 2.0)
    assert not pauses.known


def test_an_exception_knows_the_last_pause_that_it_left() -> None:
    error, outer = ValueError("no"), OSError("wrapped")
    assert pauses.step_of_left_pause(error) == -1
    pauses.mark_left_pause(error, 20)
    outer.__cause__ = error
    error.__context__ = outer  # whatever order a script uses
    assert pauses.step_of_left_pause(error) == pauses.step_of_left_pause(outer) == 20
    pauses.mark_left_pause(outer, 21)
    assert pauses.step_of_left_pause(error) == 21
