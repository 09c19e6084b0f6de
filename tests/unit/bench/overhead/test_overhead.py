from __future__ import annotations

import pytest

from bench.harness.ticks import Tick
from bench.overhead.overhead import step_time
from bench.overhead.segments import COLD, Segment, cpu_share, in_blocks, inside, ratios


def side(*blocks: list[float]) -> Segment:
    return Segment("holdfast", list(blocks))


def test_each_pair_of_blocks_gives_one_ratio_of_means_including_rare_expensive_steps() -> None:
    ours = side([2.0, 2.0, 5.0], [1.0], [9.0])  # the last block has no partner yet
    assert ratios(ours, side([1.0, 1.0, 1.0], [4.0])) == [3.0, 0.25]


@pytest.mark.parametrize(
    ("pairs", "met"),
    [
        ([1.001, 1.002, 1.0] * 10, True),
        ([1.02, 1.021, 1.022] * 10, False),
        ([0.9, 1.1] * 10, None),
        ([1.0], None),
        ([], None),
    ],
)
def test_a_ratio_is_judged_by_its_mean_and_undecided_if_noise_hides_the_limit(
    pairs: list[float], met: bool | None
) -> None:
    assert step_time(pairs).met is met


def ticks(count: int, step_s: float = 0.1) -> list[Tick]:
    return [Tick(int(step * step_s * 1e9), step, 7, 0, rank) for step in range(count) for rank in (0, 1)]


def test_the_first_block_and_the_cold_steps_of_each_are_not_counted() -> None:
    found = in_blocks(ticks(30), 10)
    assert [len(block) for block in found] == [10 - COLD] * 2
    assert found[0] == pytest.approx([0.1] * (10 - COLD))


def test_an_unfinished_block_is_not_read_before_its_end() -> None:
    assert len(in_blocks(ticks(26), 10)) == 1
    assert len(in_blocks(ticks(26), 10, last=True)) == 2
    assert in_blocks([], 10) == []


def spent(steps: int, wall_s: float, swap_s: float) -> dict[str, object]:
    return {
        "steps": {"inside": steps, "whole": steps},
        "outer": {"calls": steps, "wall_s": wall_s, "worst_s": wall_s},
        "outer_cpu_s": wall_s / 2,
        "threads_cpu_s": 0.4,
        "spent": {"exchange with a peer": {"calls": 2 * steps, "wall_s": swap_s, "worst_s": swap_s}},
    }


def test_time_inside_holdfast_is_per_step_and_averaged_over_all_ranks() -> None:
    ours = side()
    ours.spent = [spent(10, 1.0, 0.5), spent(10, 3.0, 0.5), spent(20, 0.0, 0.0)]
    found = inside(ours)
    assert (found.steps, found.wall_s) == (40, 0.1)
    assert found.threads_cpu_s == pytest.approx(1.2 / 80), "in all steps, of either kind"
    assert found.cpu_s == pytest.approx(0.05 + 1.2 / 80)
    assert found.exchange_s == pytest.approx(0.025)
    assert found.calls["exchange with a peer"].calls == 2.0
    assert inside(side()).steps == 0


def test_the_cpu_share_covers_only_holdfasts_turns() -> None:
    ours = side()
    ours.cpu_s, ours.cpu_over_s = {"sidecar": 0.3}, 4.0
    assert cpu_share(ours) == pytest.approx({"sidecar": 0.075})
    assert cpu_share(side()) == {}
