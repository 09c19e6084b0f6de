from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.progress import Phase, Progress, read
from holdfast.protocol.progress_writer import Page
from sidecar.watch.compute_time import BLOCKS, ComputeTime, StepBlock
from tests.sandbox import memory_directory

S = 1_000_000_000


def at_start() -> Progress:
    """Return the page of a rank that has just begun a generation."""
    with memory_directory() as here:
        page = Page.create(here / "page")
        page.begin(1, 0, 0, 77, 0)
        page.phase(Phase.DATA)
        found = read((here / "page").read_bytes())
    assert found is not None
    return found


START = at_start()


class Rank:
    """A rank whose page is read ten times a second."""

    def __init__(self) -> None:
        self.page, self.own, self.now_s, self.looked_s = START, ComputeTime(), 0.0, 0.0

    def does(self, step_s: float, data_s: float, forward_s: float) -> None:
        self.now_s += step_s
        self.page = replace(
            self.page,
            step=self.page.step + 1,
            steps_done=self.page.steps_done + 1,
            data_ns=self.page.data_ns + round(data_s * S),
            forward_ns=self.page.forward_ns + round(forward_s * S),
        )
        if self.now_s >= self.looked_s + 0.1:
            self.looked_s = self.now_s
            self.own = self.own.later(self.page, round(self.now_s * S))


@pytest.mark.parametrize(("step_s", "steps"), [(0.5, 50), (0.125, 50), (0.01, 500)])
def test_a_window_is_fifty_steps_and_five_seconds(step_s: float, steps: int) -> None:
    rank = Rank()
    rank.does(9.0, 8.0, 0.5)  # no window contains the first step
    for _ in range(steps - 1):
        rank.does(step_s, step_s / 4, step_s / 2)
    assert (rank.own.window, rank.own.mean_s, rank.own.least_s) == (0, 0.0, 0.0)
    for _ in range(round(1 / step_s) + 11):
        rank.does(step_s, step_s / 4, step_s / 2)
    assert rank.own.window >= steps
    assert rank.own.mean_s == pytest.approx(0.75 * step_s)
    assert rank.own.least_s == pytest.approx(0.75 * step_s)
    assert rank.own.data_s == pytest.approx(step_s / 4)


def test_one_long_step_does_not_make_the_window_long() -> None:
    rank = Rank()
    for step in range(80):
        rank.does(0.2, 30.0 if step == 60 else 0.1, 0.0)
    assert rank.own.mean_s > 0.5
    assert rank.own.least_s == pytest.approx(0.1)


def test_without_a_forward_pass_nothing_is_known() -> None:
    rank = Rank()
    for _ in range(100):
        rank.does(0.2, 0.0, 0.0)
    assert len(rank.own.blocks) == BLOCKS
    assert (rank.own.window, rank.own.mean_s, rank.own.data_s, rank.own.least_s) == (0, 0.0, 0.0, 0.0)


def test_a_new_generation_begins_a_new_window() -> None:
    rank = Rank()
    for _ in range(100):
        rank.does(0.2, 0.1, 0.0)
    rank.page = replace(START, generation=2)
    rank.does(0.2, 0.1, 0.0)
    assert rank.own.blocks == ()
    for _ in range(100):
        rank.does(0.2, 0.15, 0.0)
    assert rank.own.least_s == pytest.approx(0.15)


@given(st.integers(0, 10_000), st.floats(0.001, 3.0))
def test_the_window_contains_the_last_steps(seed: int, step_s: float) -> None:
    chance = random.Random(seed)
    rank, done = Rank(), list[float]()
    for _ in range(chance.randrange(60, 200)):
        done.append(chance.uniform(0.2, 1.0) * step_s)
        rank.does(step_s, done[-1] / 2, done[-1] / 2)
    window = rank.own.window
    if window:
        first = rank.own.steps - window
        assert rank.own.mean_s == pytest.approx(sum(done[first : first + window]) / window, abs=1e-8)
        assert min(done) - 1e-8 <= rank.own.least_s <= rank.own.mean_s + 1e-8
        assert rank.own.data_s == pytest.approx(rank.own.mean_s / 2, abs=1e-8)


BEGUN = ComputeTime(1, 10, 100 * S, 5 * S, 8 * S, (StepBlock(5, 1.0, 2.0),))


def at(steps: int, data_s: float, forward_s: float, generation: int = 1) -> Progress:
    return replace(
        START,
        generation=generation,
        steps_done=steps,
        data_ns=round(data_s * S),
        forward_ns=round(forward_s * S),
    )


@pytest.mark.parametrize(
    ("before", "found", "now_s", "expected"),
    [
        (ComputeTime(), at(0, 5.0, 3.0), 99.0, ComputeTime(1, 0, 99 * S, 5 * S, 8 * S)),
        (ComputeTime(1, 0, 99 * S, 5 * S, 8 * S), at(7, 6.0, 3.0), 100.0,
         ComputeTime(1, 7, 100 * S, 6 * S, 9 * S)),
        (ComputeTime(1, 1, 99 * S, 5 * S, 8 * S), at(6, 6.0, 4.0), 100.0,
         ComputeTime(1, 6, 100 * S, 6 * S, 10 * S, (StepBlock(5, 1.0, 2.0),))),
        (BEGUN, at(10, 5.0, 3.0), 200.0, BEGUN),
        (BEGUN, at(14, 6.0, 4.0), 200.0, BEGUN),
        (BEGUN, at(15, 6.0, 4.0), 100.499999999, BEGUN),
        (BEGUN, at(15, 7.0, 4.0), 100.5,
         ComputeTime(1, 15, 100 * S + S // 2, 7 * S, 11 * S,
                     (StepBlock(5, 1.0, 2.0), StepBlock(5, 2.0, 3.0)))),
        (BEGUN, at(16, 5.0, 4.0), 200.0,
         ComputeTime(1, 16, 200 * S, 5 * S, 9 * S, (StepBlock(5, 1.0, 2.0), StepBlock(6, 0.0, 1.0)))),
        (BEGUN, at(9, 6.0, 4.0), 200.0, ComputeTime(1, 9, 200 * S, 6 * S, 10 * S)),
        (BEGUN, at(40, 6.0, 4.0, 2), 200.0, ComputeTime(2, 40, 200 * S, 6 * S, 10 * S)),
    ],
)  # fmt: skip
def test_a_block_ends_after_five_steps_and_half_a_second_and_a_restart_discards_all_blocks(
    before: ComputeTime, found: Progress, now_s: float, expected: ComputeTime
) -> None:
    assert before.later(found, round(now_s * S)) == expected


def test_the_oldest_block_leaves_a_full_window() -> None:
    blocks = tuple(StepBlock(5, float(n), float(n + 1)) for n in range(BLOCKS))
    full = replace(BEGUN, blocks=blocks)
    assert (full.window, full.mean_s, full.data_s, full.least_s) == (50, 1.1, 0.9, 0.2)
    later = full.later(at(20, 5.5, 3.5), 200 * S)
    assert later.blocks == (*blocks[1:], StepBlock(10, 0.5, 1.0))
    assert (later.window, later.mean_s, later.data_s, later.least_s) == (55, 1.0, 45.5 / 55, 0.1)


@pytest.mark.parametrize("blocks", [BLOCKS - 1, 0])
def test_a_window_that_is_not_full_has_no_means(blocks: int) -> None:
    short = replace(BEGUN, blocks=(StepBlock(5, 1.0, 2.0),) * blocks)
    assert (short.window, short.mean_s, short.data_s, short.least_s) == (0, 0.0, 0.0, 0.0)


def test_a_window_with_a_block_without_a_forward_pass_has_no_means() -> None:
    dark = replace(BEGUN, blocks=(*(StepBlock(5, 1.0, 2.0),) * (BLOCKS - 1), StepBlock(5, 0.0, 0.0)))
    assert (dark.window, dark.mean_s, dark.data_s, dark.least_s) == (0, 0.0, 0.0, 0.0)
