from __future__ import annotations

from xml.etree import ElementTree

from bench.harness.ticks import Tick
from bench.recovery.picture import Line, Recovery, draw, progress

SECOND_NS = 1_000_000_000


def tick(at_s: float, step: int, generation: int, rank: int) -> Tick:
    return Tick(int(at_s * SECOND_NS), step, 100 + rank, generation, rank)


def test_a_step_counts_once_the_last_rank_has_done_it() -> None:
    ticks = [tick(1.0, 0, 0, 0), tick(1.5, 0, 0, 1), tick(2.0, 1, 0, 0)]
    assert progress(ticks, SECOND_NS, 10.0) == (((0.5, 1),),)


def test_each_generation_is_a_separate_line_and_the_picture_ends_at_its_time_limit() -> None:
    ticks = [tick(at_s, step, generation, rank) for at_s, step, generation in
             ((1.0, 0, 0), (2.0, 1, 0), (3.0, 1, 1), (9.0, 2, 1)) for rank in (0, 1)]  # fmt: skip
    assert progress(ticks, SECOND_NS, 5.0) == (((0.0, 1), (1.0, 2)), ((2.0, 2),))


def test_the_picture_is_well_formed_and_states_the_cost_of_each_kill() -> None:
    kills = (Recovery(2.0, 100, 0.12, 0),), (Recovery(2.0, 100, 4.3, 50),)
    lines = [
        Line("holdfast", (((0.0, 1), (2.0, 100)), ((2.12, 101), (10.0, 480))), kills[0]),
        Line("torchrun", (((0.0, 1), (2.0, 100)), ((6.3, 51), (10.0, 230))), kills[1]),
    ]
    drawn = draw(lines, 10.0)
    words = " ".join(text for text in ElementTree.fromstring(drawn).itertext())
    assert "back in 0.12 s, 0 steps redone" in words
    assert "back in 4.3 s, 50 steps redone" in words
    assert "Holdfast: 480 steps" in words
    assert "torchrun: 230 steps" in words
