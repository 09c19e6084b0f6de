from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.planning.formulas import checkpoints, erlang_b, outlook, ready, young
from supervisor.planning.model import Outlook, SizingInputs

DAY_S = 86_400.0
ROUNDING = 1e-9
JOB = SizingInputs(64)


@st.composite
def jobs(draw: st.DrawFn) -> SizingInputs:
    return SizingInputs(
        nodes=draw(st.integers(1, 5_000)),
        gpus_per_node=draw(st.sampled_from([1, 8])),
        mtbf_s=draw(st.floats(3_600, 5e9)),
        node_loss=draw(st.floats(0.01, 1.0)),
        repair_s=draw(st.floats(60, 3e7)),
        replacement_s=draw(st.none() | st.floats(1, 1e6)),
        detection_s=draw(st.floats(0, 3_600)),
        recovery_s=draw(st.floats(0, 3_600)),
        step_s=draw(st.floats(0.001, 600)),
        state_bytes=draw(st.none() | st.floats(1e6, 1e15)),
        bandwidth=draw(st.none() | st.floats(1e6, 1e13)),
        slowdown=draw(st.floats(0.001, 1.0)),
        outage_s=draw(st.floats(3_600, 3e9)),
    )


@pytest.mark.parametrize("lines", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("offered", [0.01, 1.0, 13.0, 90.0])
def test_the_recursion_gives_erlangs_formula(lines: int, offered: float) -> None:
    terms = [offered**each / math.factorial(each) for each in range(lines + 1)]
    assert erlang_b(lines, offered) == pytest.approx(terms[-1] / sum(terms))


def test_a_large_pool_does_not_overflow() -> None:
    assert 0.0 < erlang_b(1_000, 900.0) < 0.01
    assert erlang_b(1_000, 1e9) == pytest.approx(1.0, abs=1e-5)


def test_without_standbys_each_lost_node_stops_training_for_its_repair() -> None:
    found = outlook(JOB, 0)
    assert ready(JOB, 0) == found.ready == 0.0
    assert found.mean_wait_s == JOB.repair_s
    training_s = 1.0 / JOB.loss_rate
    assert found.waiting == pytest.approx(JOB.repair_s / (JOB.repair_s + training_s), rel=0.01)


def test_the_waiting_is_erlangs_share_of_the_time_with_all_standbys_and_one_node_missing() -> None:
    """Two ways to the same number: the share of the time, and the waits of the nodes that find no standby."""
    only_waits = replace(
        JOB, detection_s=0.0, recovery_s=0.0, step_s=0.0, state_bytes=1.0, bandwidth=1e12, outage_s=1e15
    )
    for standbys in range(6):
        expected = erlang_b(standbys + 1, JOB.offered)
        assert outlook(only_waits, standbys).waiting == pytest.approx(expected, rel=1e-6)


def test_the_ettr_is_one_less_what_a_fault_costs_in_the_time_between_two_faults() -> None:
    rare = replace(JOB, node_loss=1e-9, outage_s=1e12, state_bytes=1.0, bandwidth=1e9)
    cost_s = rare.detection_s + rare.recovery_s + rare.step_s
    assert 1.0 - outlook(rare, 1).ettr == pytest.approx(cost_s * rare.fault_rate, rel=0.001)


@given(jobs(), st.integers(0, 30))
def test_all_shares_of_the_time_add_up_to_one(job: SizingInputs, standbys: int) -> None:
    found = outlook(job, standbys)
    parts = (found.waiting, found.recovering, found.lost_steps, found.checkpoints, found.outages, found.ettr)
    assert all(0.0 <= each <= 1.0 + ROUNDING for each in parts)
    assert sum(parts) == pytest.approx(1.0)
    assert 0.0 <= found.ready <= 1.0


@given(jobs(), st.integers(0, 30))
def test_more_standbys_never_lower_the_ettr(job: SizingInputs, standbys: int) -> None:
    fewer, more = outlook(job, standbys), outlook(job, standbys + 1)
    assert more.ettr >= fewer.ettr - ROUNDING
    assert more.ready >= fewer.ready - ROUNDING
    assert more.waiting <= fewer.waiting + ROUNDING


@given(jobs(), st.integers(0, 30), st.floats(1.0, 100.0))
def test_a_longer_mtbf_never_lowers_the_ettr(job: SizingInputs, standbys: int, factor: float) -> None:
    better = replace(job, mtbf_s=job.mtbf_s * factor)
    assert outlook(better, standbys).ettr >= outlook(job, standbys).ettr - ROUNDING


@given(jobs(), st.integers(0, 30), st.floats(0.01, 1.0))
def test_a_faster_repair_never_lowers_the_ettr(job: SizingInputs, standbys: int, factor: float) -> None:
    better = replace(job, repair_s=job.repair_s * factor)
    assert outlook(better, standbys).ettr >= outlook(job, standbys).ettr - ROUNDING


@given(jobs(), st.floats(0.1, 10.0))
def test_no_other_interval_loses_less_than_the_recommended_one(job: SizingInputs, factor: float) -> None:
    plan = checkpoints(job)

    def lost(interval_s: float) -> float:
        return plan.cost_s / interval_s + interval_s / 2.0 / plan.all_copies_s

    other_s = max(plan.write_s, plan.interval_s * factor)
    assert lost(plan.interval_s) <= lost(other_s) * (1.0 + ROUNDING)


def test_youngs_formula_gives_the_example_of_a_minute_and_a_day() -> None:
    assert young(60.0, DAY_S) == pytest.approx(3_220, rel=0.001)


def test_a_checkpoint_is_never_begun_before_the_previous_one_is_written() -> None:
    slow = checkpoints(replace(JOB, state_bytes=1e15, bandwidth=1e9, slowdown=0.001))
    assert slow.interval_s == slow.write_s == 1e6


def test_state_and_bandwidth_grow_with_the_gpus_if_they_are_not_given() -> None:
    assert checkpoints(SizingInputs(1)).write_s == checkpoints(SizingInputs(2_048)).write_s
    assert replace(JOB, state_bytes=1e12).write_s < JOB.write_s


def test_copies_on_two_nodes_are_hardly_ever_lost_together_but_one_node_has_no_second_copy() -> None:
    pair, alone = checkpoints(SizingInputs(2)), checkpoints(SizingInputs(1))
    assert pair.all_copies_s == pytest.approx(JOB.outage_s, rel=1e-5)
    assert alone.all_copies_s == pytest.approx(1.0 / (1.0 / JOB.outage_s + SizingInputs(1).loss_rate))


def test_checkpoints_as_the_only_copies_would_have_to_be_more_frequent() -> None:
    found = checkpoints(SizingInputs(2_048))
    assert found.interval_s / found.without_copies_s > 10


def test_a_lost_node_is_made_good_by_whatever_comes_first() -> None:
    assert replace(JOB, replacement_s=600.0).refill_s == 600.0
    assert replace(JOB, replacement_s=10 * JOB.repair_s).refill_s == JOB.repair_s


def test_a_job_that_loses_more_than_it_trains_makes_no_progress() -> None:
    hopeless: Outlook = outlook(replace(JOB, mtbf_s=3_600.0, step_s=DAY_S), 5)
    assert hopeless.ettr == 0.0
    assert hopeless.cost == math.inf


def test_the_price_of_a_gpu_hour_scales_all_costs() -> None:
    hours, money = outlook(JOB, 2), outlook(replace(JOB, gpu_hour_cost=2.5), 2)
    assert hours.standbys_per_day == 2 * 8 * 24
    assert money.standbys_per_day == 2.5 * hours.standbys_per_day
    assert money.waiting_per_day == pytest.approx(2.5 * hours.waiting_per_day)
    assert money.cost == pytest.approx(2.5 * hours.cost)
    assert hours.cost == pytest.approx(66 / 64 / hours.ettr)
