from __future__ import annotations

import itertools
from collections import Counter

import pytest

from bench.chaos.chaos_schedule import PlannedFault, schedule
from bench.chaos.fault_table import CHAOS_FAULTS
from bench.chaos.job_table import CHAOS_JOBS

KINDS = tuple(CHAOS_FAULTS)
BY_NAME = {each.name: each for each in CHAOS_JOBS}


def drawn(seed: int = 1, count: int = 400, double: float = 0.5) -> list[PlannedFault]:
    return list(itertools.islice(schedule(seed, KINDS, CHAOS_JOBS, double), count))


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another_one() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_a_longer_schedule_begins_like_a_shorter_one() -> None:
    assert drawn(count=50) == drawn(count=400)[:50]


def test_each_kind_occurs_equally_often() -> None:
    counts = Counter(each.kind for each in drawn(count=3 * len(KINDS)))
    assert counts == dict.fromkeys(KINDS, 3)


def test_each_job_whose_owner_does_not_count_it_is_struck_by_each_fault_and_no_other_job() -> None:
    struck: dict[str, set[str]] = {}
    for each in drawn(count=2000):
        struck.setdefault(each.kind, set()).add(each.job)
    for kind, jobs in struck.items():
        fault = CHAOS_FAULTS[kind]
        if not fault.strikes_one_job:
            assert jobs == {""}
        else:
            assert jobs == {job.name for job in CHAOS_JOBS if job.kind in fault.owners}


def test_every_rank_is_struck_and_none_that_does_not_exist() -> None:
    ranks = {(each.job, each.rank) for each in drawn() if each.job}
    assert ranks == {(job.name, rank) for job in CHAOS_JOBS for rank in range(job.members)}


def test_each_fault_lasts_as_long_as_the_table_says() -> None:
    for each in drawn():
        low, high = each.fault.lasts_s
        assert low - 0.1 <= each.lasts_s <= high + 0.1


def test_a_second_fault_never_strikes_the_same_job_or_the_same_leader() -> None:
    twice = [each for each in drawn(count=2000, double=1.0) if each.second]
    assert twice
    for each in twice:
        first, second = each.fault, CHAOS_FAULTS[each.second]
        assert first.is_in_place or first.place == "leader"
        if second.place == "leader":
            assert first.is_in_place
            assert each.second_job == ""
        else:
            assert each.second_job in BY_NAME
            assert each.second_job != each.job


def test_a_fault_that_takes_a_member_or_what_all_jobs_use_comes_alone() -> None:
    for each in drawn(count=2000, double=1.0):
        if each.fault.place not in ("rank", "sidecar", "leader"):
            assert not each.second


def test_without_the_probability_of_a_second_fault_there_is_none() -> None:
    assert not any(each.second for each in drawn(double=0.0))


def test_a_fault_without_a_suitable_job_is_left_out() -> None:
    only = [job for job in CHAOS_JOBS if job.kind == "Job"]
    found = list(itertools.islice(schedule(1, ("delete", "kill"), only, 0.0), 10))
    assert {each.kind for each in found} == {"kill"}


@pytest.mark.parametrize(
    ("planned", "line"),
    [
        (PlannedFault(3, "kill", "indexed", 1, 0.0, 0.0), "  3  kill (rank 1 of indexed)"),
        (PlannedFault(12, "api-stop", "", 0, 0.0, 20.4), " 12  api-stop for 20 s"),
        (
            PlannedFault(4, "kill", "indexed", 0, 0.0, 0.0, "leader-kill", second_s=0.46),
            "  4  kill (rank 0 of indexed), and 0.5 s later leader-kill",
        ),
        (
            PlannedFault(5, "leader-kill", "", 0, 0.0, 0.0, "kill", "pytorch", 1, 0.2),
            "  5  leader-kill, and 0.2 s later kill (rank 1 of pytorch)",
        ),
    ],
)
def test_one_line_says_what_is_planned(planned: PlannedFault, line: str) -> None:
    assert planned.line == line
