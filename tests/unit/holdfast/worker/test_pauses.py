from __future__ import annotations

from holdfast.worker import pauses
from holdfast.worker.pauses import UNKNOWN_S, WORTH, Pauses

COPY_S = 0.1


def paused(pauses: Pauses, label: str, lasts_s: float, writes: bool) -> None:
    pauses.began(label, 50.0)
    if writes:
        pauses.writes()
    pauses.ended(50.0 + lasts_s)


def test_the_first_pause_of_a_label_is_played_safe_unless_the_copy_takes_long() -> None:
    pauses = Pauses()
    assert pauses.wants_copy("eval", COPY_S)
    assert not pauses.wants_copy("eval", UNKNOWN_S * 2)


def test_a_pause_that_only_reads_needs_no_copy() -> None:
    pauses = Pauses()
    paused(pauses, "eval", 60.0, writes=False)
    assert not pauses.wants_copy("eval", COPY_S)
    assert pauses.wants_copy("other", COPY_S)


def test_one_that_wrote_once_is_copied_for_ever_if_it_lasts_long_enough() -> None:
    pauses = Pauses()
    paused(pauses, "eval", COPY_S * WORTH * 2, writes=True)
    paused(pauses, "eval", COPY_S, writes=False)
    assert pauses.wants_copy("eval", COPY_S)
    paused(pauses, "short", COPY_S, writes=True)
    assert not pauses.wants_copy("short", COPY_S)


def test_what_is_known_is_known_of_the_present_pause_only() -> None:
    pauses = Pauses()
    pauses.began("eval", 0.0)
    assert not pauses.known
    pauses.writes()
    assert pauses.known
    pauses.ended(1.0)
    pauses.began("eval", 2.0)
    assert not pauses.known


def test_an_exception_knows_the_last_pause_that_it_left() -> None:
    error, outer = ValueError("no"), OSError("wrapped")
    assert pauses.left_by(error) == -1
    pauses.leaves(error, 20)
    outer.__cause__ = error
    error.__context__ = outer  # whatever a script makes of them
    assert pauses.left_by(error) == pauses.left_by(outer) == 20
    pauses.leaves(outer, 21)
    assert pauses.left_by(error) == 21
