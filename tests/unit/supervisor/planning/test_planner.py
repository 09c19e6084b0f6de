from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.planning.formulas import outlook, ready
from supervisor.planning.model import SizingInputs
from supervisor.planning.planner import MOST, plan, recommended

DAY_S = 86_400.0
JOB = SizingInputs(64)


@pytest.mark.parametrize("nodes", [1, 3, 64, 512, 2_048])
@pytest.mark.parametrize("mtbf_days", [10, 264, 3_650])
def test_no_other_number_of_standbys_has_a_cheaper_useful_hour(nodes: int, mtbf_days: float) -> None:
    job = SizingInputs(nodes, mtbf_s=mtbf_days * DAY_S)
    best = recommended(job)
    assert min(range(MOST), key=lambda each: outlook(job, each).cost) == best


@pytest.mark.parametrize("nodes", [1, 64, 512, 2_048])
def test_99_percent_of_the_lost_nodes_find_a_standby_with_the_number_for_it_and_not_with_one_less(
    nodes: int,
) -> None:
    job = SizingInputs(nodes)
    enough = plan(job).for_99
    assert ready(job, enough) >= 0.99
    assert ready(job, enough - 1) < 0.99


def test_more_nodes_need_more_standbys_but_a_smaller_share() -> None:
    small, large = recommended(SizingInputs(64)), recommended(SizingInputs(2_048))
    assert large > small
    assert large / 2_048 < small / 64


def test_a_cluster_with_free_nodes_needs_fewer_standbys() -> None:
    assert recommended(replace(JOB, replacement_s=600.0)) < recommended(JOB)


def test_the_price_does_not_change_the_recommendation() -> None:
    assert recommended(replace(JOB, gpu_hour_cost=0.01)) == recommended(replace(JOB, gpu_hour_cost=99.0))


def test_the_plan_has_an_outlook_for_each_number_up_to_the_one_that_was_asked_for() -> None:
    found = plan(JOB, 17)
    assert [each.standbys for each in found.outlooks] == list(range(18))
    assert found.outlooks[2] == outlook(JOB, 2)
    assert len(plan(JOB).outlooks) > found.recommended + 1


def test_more_than_the_largest_number_of_standbys_is_never_recommended() -> None:
    assert recommended(SizingInputs(100_000, mtbf_s=10 * DAY_S)) == MOST


def test_no_standby_is_recommended_if_none_helps() -> None:
    assert recommended(replace(JOB, mtbf_s=3_600.0, step_s=DAY_S)) == 0


def test_the_variations_change_one_input_each() -> None:
    found = {each.change: each for each in plan(JOB).variations}
    halved, doubled = found["MTBF halved"], found["MTBF doubled"]
    assert halved.standbys == recommended(replace(JOB, mtbf_s=JOB.mtbf_s / 2)) > doubled.standbys
    assert found["lost nodes back in twice the time"].standbys == halved.standbys
    assert found["outages twice as often"].interval_s == pytest.approx(
        plan(JOB).checkpoint.interval_s / 2**0.5, rel=0.001
    )


def test_a_slower_replacement_is_not_hidden_by_the_repair() -> None:
    job = replace(JOB, repair_s=DAY_S, replacement_s=DAY_S)
    found = {each.change: each for each in plan(job).variations}
    slower = replace(job, repair_s=2 * DAY_S, replacement_s=None)
    assert found["lost nodes back in twice the time"].standbys == recommended(slower)
