from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.harness.ticks import VARIABLE, Tick, Ticker, TickFile, newest, redone, regained, step_times_s


def tick(at: int, step: int, rank: int, generation: int = 0, pid: int = 0) -> Tick:
    return Tick(at, step, pid or 100 * generation + rank + 1, generation, rank)


BEFORE = [tick(10, 0, 0), tick(11, 0, 1), tick(20, 1, 0), tick(21, 1, 1), tick(30, 2, 0)]


def test_records_are_read_back_with_rank_and_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ticks"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    Ticker().tick(7)
    [found] = TickFile(path).follow()
    assert (found.step, found.pid, found.generation, found.rank) == (7, os.getpid(), 2, 3)
    assert found.at_ns > 0


def test_a_script_outside_a_bench_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    Ticker().tick(1)
    assert list(tmp_path.iterdir()) == []


def test_a_partial_record_is_read_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ticks"
    follower = TickFile(path)
    assert follower.follow() == []
    monkeypatch.setenv(VARIABLE, str(path))
    Ticker().tick(1)
    Ticker().tick(2)
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    assert [each.step for each in follower.follow()] == [1]
    path.write_bytes(whole)
    assert [each.step for each in follower.follow()] == [1, 2]


def test_the_newest_records_are_those_of_one_generation() -> None:
    found = newest([*BEFORE, tick(99, 0, 1, generation=1)])
    assert {rank: each.generation for rank, each in found.items()} == {1: 1}


def test_a_group_has_regained_once_its_last_rank_has_stepped() -> None:
    after = [tick(50, 2, 1, generation=1), tick(60, 3, 1, generation=1)]
    assert regained([*BEFORE, *after], 0, 2) is None
    found = regained([*BEFORE, *after, tick(65, 2, 0, generation=1)], 0, 2)
    assert found is not None
    assert (found.generation, found.first_ns, found.all_ns, found.step) == (1, 50, 65, 2)


def test_a_generation_that_fails_before_all_have_stepped_does_not_count() -> None:
    after = [tick(50, 2, 1, 1), tick(80, 2, 0, 2), tick(81, 2, 1, 2)]
    found = regained([*BEFORE, *after], 0, 2)
    assert found is not None
    assert (found.generation, found.all_ns) == (2, 81)


def test_a_step_of_the_old_generation_after_the_kill_is_not_a_recovery() -> None:
    assert regained([*BEFORE, tick(31, 2, 1)], 0, 2) is None


@pytest.mark.parametrize(("step", "expected"), [(3, 0), (2, 1), (0, 3)])
def test_steps_are_redone_from_the_step_at_which_the_group_resumes(step: int, expected: int) -> None:
    after = [tick(50, step, 0, 1), tick(51, step, 1, 1)]
    found = regained([*BEFORE, *after], 0, 2)
    assert found is not None
    assert redone([*BEFORE, *after], 0, found) == expected


def test_step_times_omit_the_first_steps_of_each_generation_and_the_gap_between_generations() -> None:
    ns = 1_000_000_000
    ticks = [tick(at * ns, at, 0) for at in range(5)]
    ticks += [tick((100 + 2 * at) * ns, at, 0, generation=1) for at in range(4)]
    assert step_times_s(ticks, 0, 1) == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert step_times_s(ticks, 1, 0) == []
