from __future__ import annotations

import pytest

from bench.chaos.fault_table import ALL, CHAOS_FAULTS, RESTARTED, SECOND, usable
from bench.chaos.job_table import CHAOS_JOBS
from holdfast.protocol.drills import DRILLS

COMMANDS = {need: "command" for each in CHAOS_FAULTS.values() for need in each.needs}


def test_every_drill_of_a_rank_and_every_fault_of_both_lists_is_in_the_table() -> None:
    ranks = {name for name, each in DRILLS.items() if each.executor in ("rank", "launcher")}
    others = {
        *("sidecar", "launcher", "evict", "delete", "leader-kill", "leader-freeze", "leader-delete", "drain"),
        *("node-kill", "node-cut", "api-stop", "webhook-away", "evict-missed", "storage-refuses"),
    }
    assert set(CHAOS_FAULTS) == ranks | others


def test_with_all_commands_every_fault_is_usable() -> None:
    assert usable(COMMANDS) == (tuple(CHAOS_FAULTS), ())


@pytest.mark.parametrize("lacking", COMMANDS)
def test_a_fault_without_a_command_is_left_out_and_the_reason_names_the_variable(lacking: str) -> None:
    kinds, left_out = usable({**COMMANDS, lacking: " "})
    [line] = left_out
    [kind] = set(CHAOS_FAULTS) - set(kinds)
    assert lacking in CHAOS_FAULTS[kind].needs
    assert line == f"left out: {kind}, because {lacking} is not set"


def test_both_missing_commands_are_named() -> None:
    _, left_out = usable({})
    assert "left out: node-cut, because HOLDFAST_NODE_CUT and HOLDFAST_NODE_HEAL are not set" in left_out


def test_a_fault_that_lasts_is_one_that_can_be_ended() -> None:
    lasting = {name for name, each in CHAOS_FAULTS.items() if each.lasts_s[1]}
    assert lasting == {
        *("leader-freeze", "drain", "node-kill", "node-cut", "api-stop", "webhook-away", "evict-missed"),
        "storage-refuses",
    }
    assert all(low <= high < each.calm_s for each in CHAOS_FAULTS.values() for low, high in [each.lasts_s])


def test_a_fault_that_ends_processes_has_a_sign_and_what_all_jobs_use_has_none() -> None:
    assert {
        each.sign for each in CHAOS_FAULTS.values() if each.place in ("rank", "pod", "missed pod", "node")
    } == {"incident"}
    silent = {name for name, each in CHAOS_FAULTS.items() if not each.sign}
    assert silent == {"leader-freeze", "api-stop", "webhook-away", "storage-refuses"}


def test_only_a_nan_may_cost_more_than_a_step() -> None:
    assert {name for name, each in CHAOS_FAULTS.items() if each.most_lost != 1} == {"nan"}


def test_no_fault_counts_as_a_failure_of_a_job_whose_pods_are_never_restarted() -> None:
    counted = {name for name, each in CHAOS_FAULTS.items() if each.owners != ALL}
    assert counted == {"launcher", "delete", "evict-missed"}
    assert all(CHAOS_FAULTS[name].owners == RESTARTED for name in counted)


def test_the_second_fault_strikes_processes_only() -> None:
    assert all(CHAOS_FAULTS[name].place in ("rank", "leader") for name in SECOND)


def test_there_is_a_job_of_each_kind_with_and_without_standby_and_storage() -> None:
    assert {each.kind for each in CHAOS_JOBS} == ALL
    assert {each.standby for each in CHAOS_JOBS} == {0, 1}
    assert {each.stored for each in CHAOS_JOBS} == {True, False}
    assert len({each.prefix for each in CHAOS_JOBS}) == len(CHAOS_JOBS)
