"""A rank that becomes slow is named, and so is its return to normal; nothing else is done."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import START_S

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def run(start_shared: Start, orders: Path) -> Iterator[Run]:
    run = start_shared("--members 2 --checkpoint-every 0", "slow_rank.py", orders)
    run.wait(has_windows, "a window of each rank", START_S)
    yield run
    assert run.stop().code == 130


def has_windows(status: Json) -> bool:
    return [bool(each["own_s"]) for each in status["ranks"]] == [True, True]


def until_slow(run: Run, rank: int) -> Json:
    """Wait until `rank` is named as slow; the other rank must never be."""

    def named(status: Json) -> bool:
        slow = [each["rank"] for each in status["ranks"] if each["slow"]]
        assert slow in ([], [rank]), status["ranks"]
        return bool(slow)

    found = run.wait(named, f"rank {rank} is slow")["ranks"][rank]
    assert isinstance(found, dict)
    return found


def until_told(run: Run, line: str, times: int = 1) -> None:
    run.wait(lambda _: run.output().count(line) >= times, f"{times} times in the output: {line}")
    assert run.output().count(line) == times


@pytest.mark.parametrize(("phase", "rank"), [("data", 0), ("forward", 1)])
def test_a_rank_that_becomes_slow_is_named_until_it_no_longer_is(
    run: Run, orders: Path, phase: str, rank: int
) -> None:
    order = orders / f"{phase}-{rank}"
    order.touch()
    found = until_slow(run, rank)
    assert found["slow"] > 1.5
    assert found["own_s"] > 1.5 * found["peers_s"]
    until_told(run, f"rank {rank} is slow: ")
    order.unlink()
    run.wait(lambda status: not status["ranks"][rank]["slow"], "it is over")
    until_told(run, f"rank {rank} is no longer slow")
    assert run.output().count(f"rank {1 - rank} is slow") == rank  # rank 0 had its turn before rank 1
    assert run.incidents() == []


def test_a_slow_rank_is_found_again_by_the_next_supervisor(run: Run, orders: Path) -> None:
    order = orders / "data-1"
    before = run.output().count("rank 1 is slow: ")
    order.touch()
    until_slow(run, 1)
    until_told(run, "rank 1 is slow: ", before + 1)
    pid = run.running()["supervisor_pid"]
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda status: status["supervisor_pid"] != pid, "another supervisor")
    until_slow(run, 1)
    until_told(run, "rank 1 is slow: ", before + 2)
    order.unlink()
    run.wait(lambda status: not status["ranks"][1]["slow"], "it is over")
    assert run.incidents() == []
