from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.member_messages import RankProgress
from supervisor.view.model import MemberView, View
from supervisor.view.slow_ranks import SlowRank, find_slow_ranks
from tests.unit.supervisor.job_views import launcher, member, progress, report, view

BLOCKS, STEPS = 10, 5  # the steps of a window, as the sidecar keeps it
WINDOW = BLOCKS * STEPS


def told(
    rank: int, own_s: float, least_s: float | None = None, step_s: float = 0.1, step: int = 200
) -> RankProgress:
    """Return the progress of a rank whose own time was never less than `least_s` in its window."""
    least_s = own_s if least_s is None else least_s
    said = replace(progress(rank, step), step_s=step_s, own_s=own_s, own_least_s=least_s)
    return replace(said, own_data_s=own_s / 2, own_steps=WINDOW)


def seen(*ranks: RankProgress, generation: int = 1) -> View:
    """Return a view of a group with a rank in each member."""
    names = tuple(f"m{each.rank}" for each in ranks)
    members = [_member(name, each, generation) for name, each in zip(names, ranks, strict=True)]
    return view(*members, generation=generation, placement=names, world_size=len(names))


def _member(name: str, rank: RankProgress, generation: int) -> MemberView:
    return member(name, report(name, launcher(generation=generation), progress=(rank,)))


def named(*ranks: RankProgress) -> list[int]:
    return [each.rank for each in find_slow_ranks((), seen(*ranks))]


def test_a_rank_that_takes_more_than_the_others_is_slow() -> None:
    found = find_slow_ranks((), seen(told(0, 0.03), told(1, 0.084), told(2, 0.03), told(3, 0.034)))
    assert found == (SlowRank(1, 1, 0.084, 0.042, 0.03, 150),)
    assert found[0].factor == pytest.approx(2.8)


def test_of_two_ranks_the_other_is_the_measure_and_a_single_rank_is_never_slow() -> None:
    assert named(told(0, 0.03), told(1, 0.05)) == [1]
    assert named(told(0, 0.05), told(1, 0.03)) == [0]
    assert named(told(0, 0.04), told(1, 0.03)) == []
    assert named(told(0, 5.0)) == []


def test_a_partial_window_names_no_slow_rank() -> None:
    assert named(told(0, 0.03), told(1, 0.3, least_s=0.04)) == []


def test_a_difference_that_is_small_beside_the_step_does_not_count() -> None:
    assert named(told(0, 0.03, step_s=1.0), told(1, 0.08, step_s=1.0)) == []
    assert named(told(0, 0.0001, step_s=0.002), told(1, 0.0009, step_s=0.002)) == []


@pytest.mark.parametrize(
    "hidden",
    [
        {"connected": False},
        {"name": "standby"},
        {"report": None},
        {"report": report("m1", None, progress=(told(1, 0.09),))},
        {"report": report("m1", launcher(generation=0), progress=(told(1, 0.09),))},
        {"report": report("m1", launcher(), progress=(progress(1, 200),))},
    ],
)
def test_an_unknown_time_keeps_the_previous_verdict(hidden: dict[str, Any]) -> None:
    whole = seen(told(0, 0.03), told(1, 0.09))
    before = find_slow_ranks((), whole)
    away = replace(whole, members=(whole.members[0], replace(whole.members[1], **hidden)))
    assert find_slow_ranks((), away) == ()
    assert find_slow_ranks(before, away) == before
    alone = replace(away, members=away.members[1:])
    assert find_slow_ranks(before, alone) == before


def test_a_rank_stops_being_slow_only_when_its_average_has_decreased() -> None:
    before = find_slow_ranks((), seen(told(0, 0.03), told(1, 0.09)))
    for own_s in (0.2, 0.06, 0.04):
        [still] = find_slow_ranks(before, seen(told(0, 0.03), told(1, own_s, least_s=0.03, step=999)))
        assert (still.own_s, still.since) == (own_s, 150)
    assert find_slow_ranks(before, seen(told(0, 0.03), told(1, 0.037))) == ()
    assert find_slow_ranks(before, seen(told(0, 0.03, step_s=1.0), told(1, 0.07, step_s=1.0))) == ()


def test_a_new_generation_starts_without_slow_ranks() -> None:
    before = find_slow_ranks((), seen(told(0, 0.03), told(1, 0.09)))
    assert find_slow_ranks(before, seen(told(0, 0.03), told(1, 0.04), generation=2)) == ()


def test_a_new_supervisor_detects_a_slow_rank_again() -> None:
    whole = seen(told(0, 0.03), told(1, 0.09))
    assert find_slow_ranks((), whole) == find_slow_ranks(find_slow_ranks((), whole), whole)


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=9))
def test_the_measure_is_the_median_of_the_others(owns: list[float]) -> None:
    ranks = [told(number, own_s, step_s=0.001) for number, own_s in enumerate(owns)]
    for found in find_slow_ranks((), seen(*ranks)):
        others = statistics.median(owns[: found.rank] + owns[found.rank + 1 :])
        assert found.peers_s == pytest.approx(others)
        assert owns[found.rank] > 1.5 * others
    slowest = max(range(len(owns)), key=owns.__getitem__)
    others = statistics.median(owns[:slowest] + owns[slowest + 1 :])
    assert (slowest in named(*ranks)) == (owns[slowest] > 1.5 * others and owns[slowest] - others >= 0.001)


def test_a_rank_is_slow_above_a_factor_and_a_minimum_difference() -> None:
    """Twice as slow as its peer, by a tenth of the step or by a millisecond."""
    assert named(told(0, 0.25), told(1, 0.5, least_s=0.375)) == []
    assert named(told(0, 0.25), told(1, 0.5, least_s=0.376)) == [1]
    assert named(told(0, 0.25, step_s=2.5), told(1, 0.5, step_s=2.5)) == [1]
    assert named(told(0, 0.25, step_s=2.5), told(1, 0.5, step_s=2.6)) == []
    assert named(told(0, 0.0009, step_s=0.002), told(1, 0.0019, step_s=0.002)) == [1]


def test_a_rank_is_slow_until_its_average_is_below_a_lower_factor_or_half_the_difference() -> None:
    before = find_slow_ranks((), seen(told(0, 0.25), told(1, 0.5)))
    for own_s, step_s, slow in (
        (0.3125, 0.1, True),
        (0.3124, 0.1, False),
        (0.5, 5.0, True),
        (0.5, 5.1, False),
    ):
        now = seen(told(0, 0.25, step_s=step_s), told(1, own_s, step_s=step_s))
        assert bool(find_slow_ranks(before, now)) is slow, (own_s, step_s)


def test_ranks_of_equal_speed_are_not_slow_because_one_is_much_faster() -> None:
    assert named(told(0, 0.001), *(told(number, 0.5) for number in range(1, 5))) == []


def test_a_rank_is_slow_since_the_beginning_of_its_window() -> None:
    [young] = find_slow_ranks((), seen(told(0, 0.03), told(1, 0.09, step=20)))
    assert young == SlowRank(1, 1, 0.09, 0.045, 0.03, 0)
    several = find_slow_ranks(
        (), seen(told(3, 0.09), told(0, 0.03), told(1, 0.08), told(2, 0.03), told(4, 0.03))
    )
    assert several == (SlowRank(1, 1, 0.08, 0.04, 0.03, 150), SlowRank(1, 3, 0.09, 0.045, 0.03, 150))


class History:
    """A group of ranks with given steps, judged after every block."""

    def __init__(self, world_size: int) -> None:
        self._owns: list[list[float]] = [[] for _ in range(world_size)]
        self.slow: tuple[SlowRank, ...] = ()

    def block(self, steps: list[list[float]]) -> tuple[int, ...]:
        """Add the own times of some steps to each rank. Return the ranks that are now slow."""
        for owns, added in zip(self._owns, steps, strict=True):
            owns.append(statistics.fmean(added))
        windows = [owns[-BLOCKS:] for owns in self._owns]
        step_s = max(map(statistics.fmean, windows)) * 1.5
        step = STEPS * len(self._owns[0])
        whole = len(windows[0]) == BLOCKS
        ranks = [
            told(number, statistics.fmean(window), min(window), step_s, step)
            if whole
            else progress(number, step)
            for number, window in enumerate(windows)
        ]
        self.slow = find_slow_ranks(self.slow, seen(*ranks))
        return tuple(each.rank for each in self.slow)


@given(st.integers(0, 1 << 32), st.integers(2, 5))
def test_steps_that_vary_by_five_give_no_false_alarm(seed: int, world_size: int) -> None:
    chance, history = random.Random(seed), History(world_size)
    for _ in range(30):
        steps = [[chance.uniform(0.01, 0.05) for _ in range(STEPS)] for _ in range(world_size)]
        assert history.block(steps) == ()


@given(st.integers(0, 1 << 32), st.integers(2, 5))
def test_occasional_pauses_of_the_machine_give_no_false_alarm(seed: int, world_size: int) -> None:
    chance, history = random.Random(seed), History(world_size)
    for _ in range(30):
        steps = [
            [3.0 if chance.random() < 0.02 else chance.uniform(0.03, 0.04) for _ in range(STEPS)]
            for _ in range(world_size)
        ]
        assert history.block(steps) == ()


@given(st.integers(0, 1 << 32), st.integers(2, 5), st.floats(2.5, 10.0))
def test_a_rank_that_becomes_slow_is_named_and_released_within_a_window(
    seed: int, world_size: int, factor: float
) -> None:
    chance, history = random.Random(seed), History(world_size)
    who = chance.randrange(world_size)

    def block(times: float) -> tuple[int, ...]:
        return history.block(
            [
                [chance.uniform(0.02, 0.03) * (times if rank == who else 1.0) for _ in range(STEPS)]
                for rank in range(world_size)
            ]
        )

    assert all(block(1.0) == () for _ in range(30))
    assert [block(factor) for _ in range(BLOCKS)][-1] == (who,)
    assert all(block(factor) == (who,) for _ in range(20))
    assert [block(1.0) for _ in range(BLOCKS)][-1] == ()
    assert all(block(1.0) == () for _ in range(20))
