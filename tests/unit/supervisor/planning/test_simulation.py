"""The simulation and the formulas agree within the statistical error of the simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from supervisor.planning.formulas import outlook, ready
from supervisor.planning.model import SizingInputs
from supervisor.planning.planner import recommended
from supervisor.planning.simulation import Simulated, simulate

DAY_S = 86_400.0
ERRORS = 4.0  # standard errors; chance alone exceeds them once in 16,000 comparisons
JOB = SizingInputs(64)


def run(job: SizingInputs, standbys: int, *, fixed_repairs: bool = False, events: int = 20_000) -> Simulated:
    return simulate(job, standbys, random.Random(7).random, events=events, fixed_repairs=fixed_repairs)


def agrees(found: Simulated, job: SizingInputs, standbys: int, *, rounding: float = 1e-4) -> None:
    expected = outlook(job, standbys)
    assert abs(found.ettr - expected.ettr) <= ERRORS * found.ettr_error + rounding
    assert abs(found.waiting - expected.waiting) <= ERRORS * found.waiting_error + rounding


@pytest.mark.parametrize("nodes", [3, 64, 512, 2_048])
@pytest.mark.parametrize("fixed_repairs", [False, True])
def test_the_simulation_agrees_with_the_formulas(nodes: int, fixed_repairs: bool) -> None:
    """Fixed repair times too: Erlang's formula depends only on the mean."""
    job = SizingInputs(nodes)
    for standbys in {0, 1, recommended(job)}:
        agrees(run(job, standbys, fixed_repairs=fixed_repairs), job, standbys)


def test_the_error_is_small_enough_to_tell_one_standby_from_two() -> None:
    one, two = run(JOB, 1), run(JOB, 2)
    assert two.ettr - one.ettr > 10 * (one.ettr_error + two.ettr_error)
    assert one.ettr_error < 0.005


@pytest.mark.parametrize("standbys", [0, 1, 3])
def test_the_share_of_the_lost_nodes_that_find_a_standby_agrees(standbys: int) -> None:
    assert run(JOB, standbys).ready == pytest.approx(ready(JOB, standbys), abs=0.02)


@pytest.mark.parametrize("standbys", [0, 5, 40])
def test_they_agree_while_nodes_are_lost_faster_than_they_are_repaired(standbys: int) -> None:
    worn = SizingInputs(64, mtbf_s=10 * DAY_S, node_loss=1.0)
    assert worn.offered > 12
    agrees(run(worn, standbys), worn, standbys)


def test_they_agree_for_a_cluster_that_replaces_nodes_at_once() -> None:
    elastic = SizingInputs(512, replacement_s=300.0)
    agrees(run(elastic, 0), elastic, 0)
    agrees(run(elastic, 1), elastic, 1)


def test_they_agree_where_checkpoints_and_outages_cost_most() -> None:
    """The last checkpoint before an outage is found by its time, and not by half an interval."""
    fragile = replace(JOB, node_loss=1e-6, outage_s=DAY_S, state_bytes=1e13, bandwidth=1e10)
    assert outlook(fragile, 0).outages > 0.03
    agrees(run(fragile, 0), fragile, 0, rounding=0.003)


def test_a_node_that_is_never_lost_needs_no_standby() -> None:
    found = run(replace(JOB, node_loss=1e-12), 0)
    assert found.ready == 1.0
    assert found.waiting == 0.0


def test_the_same_seed_gives_the_same_result_and_another_seed_another_one() -> None:
    first, again = run(JOB, 1, events=400), run(JOB, 1, events=400)
    assert first == again
    assert simulate(JOB, 1, random.Random(8).random, events=400) != first


def test_a_job_that_loses_more_than_it_trains_makes_no_progress_in_the_simulation_either() -> None:
    assert run(replace(JOB, mtbf_s=3_600.0, step_s=DAY_S), 2, events=2_000).ettr == 0.0
