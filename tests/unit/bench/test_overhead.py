from __future__ import annotations

import pytest

from bench.overhead import order, ratios
from bench.segments import Segment, cpu_share, inside


def segment(name: str, *times_s: float) -> Segment:
    return Segment(name, list(times_s))


def test_segments_alternate_so_that_a_drift_hits_both() -> None:
    assert order(3) == ["holdfast", "torchrun", "torchrun", "holdfast", "holdfast", "torchrun"]


def test_each_pair_gives_one_ratio_of_holdfast_to_torchrun() -> None:
    done = [
        segment("holdfast", 2.0, 2.0, 5.0),
        segment("torchrun", 1.0, 1.0, 1.0),
        segment("torchrun", 4.0),
        segment("holdfast", 1.0),
        segment("holdfast", 9.0),  # interrupted before its partner
    ]
    assert ratios(done) == [(2.0, 3.0), (0.25, 0.25)]


def spent(steps: int, wall_s: float, swap_s: float) -> dict[str, object]:
    return {
        "steps": steps,
        "outer": {"calls": steps, "wall_s": wall_s, "worst_s": wall_s},
        "outer_cpu_s": wall_s / 2,
        "spent": {"exchange with a peer": {"calls": 2 * steps, "wall_s": swap_s, "worst_s": swap_s}},
    }


def test_time_inside_holdfast_is_per_step_over_all_ranks() -> None:
    one, other = segment("holdfast"), segment("holdfast")
    one.spent, other.spent = [spent(10, 1.0, 0.5), spent(10, 3.0, 0.5)], [spent(20, 0.0, 0.0)]
    found = inside([one, other, segment("torchrun")], "holdfast")
    assert (found.steps, found.wall_s, found.cpu_s) == (40, 0.1, 0.05)
    assert found.exchange_s == pytest.approx(0.025)
    assert found.calls["exchange with a peer"].calls == 2.0
    assert inside([segment("torchrun")], "torchrun").steps == 0


def test_the_share_of_a_core_is_over_all_segments() -> None:
    one, other = segment("holdfast"), segment("holdfast")
    one.cpu_s, one.cpu_over_s = {"sidecar": 0.1}, 1.0
    other.cpu_s, other.cpu_over_s = {"sidecar": 0.2}, 3.0
    assert cpu_share([one, other, segment("torchrun")]) == pytest.approx({"sidecar": 0.075})
    assert cpu_share([]) == {}
