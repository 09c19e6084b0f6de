"""Ranks that stop getting on: found in time, the right one named, with stacks; and no false alarms."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

ROUNDS = 5  # of four kinds: twenty


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def run(start_shared: Start, orders: Path) -> Iterator[Run]:
    run = start_shared("--members 2 --checkpoint-every 0", "hanging.py", orders)
    yield run
    assert run.stop().code == 130


def stopped(run: Run, _orders: Path, rank: int) -> Callable[[], object]:
    return lambda: run.hit(rank, signal.SIGSTOP)


def by_script(how: str) -> Callable[[Run, Path, int], Callable[[], object]]:
    return lambda _run, orders, rank: (orders / f"{how}-{rank}").touch


HANGS = {
    "stopped": stopped,
    "absent": by_script("absent"),
    "loader": by_script("loader"),
    "spin": by_script("spin"),
}


@pytest.mark.parametrize("turn", range(ROUNDS))
@pytest.mark.parametrize("how", HANGS)
def test_a_hang_is_found_in_time_and_its_rank_is_named(run: Run, orders: Path, how: str, turn: int) -> None:
    rank = turn % 2
    before = run.steady(30)  # of fewer steps the p99 says too little to be strict
    found = run.broken(HANGS[how](run, orders, rank))
    after = run.running()  # the step times go over generations: a busy machine shows in them
    p99_s = max(each["p99_s"] or 0.0 for each in (*before["ranks"], *after["ranks"]))
    assert (found["kind"], found["rank"]) == ("hang", rank), found["why"]
    assert found["detected_s"] <= 3 * p99_s + 1, (p99_s, found["timeline"])
    assert found["lost_steps"] <= 1
    shown = sorted(each for group in found["stacks"] for each in group["ranks"])
    assert shown == [0, 1], "stacks of all ranks"
    assert found["open"] is False


def test_the_stack_shows_where_it_hangs(run: Run) -> None:
    found = [each for each in run.incidents() if each["kind"] == "hang"]
    text = "".join(str(each["stacks"]) for each in found)
    assert "spin (" in text
    assert "read_batch (" in text


def test_a_rank_that_goes_on_while_it_is_looked_at_is_no_incident(run: Run) -> None:
    before = run.steady(30)
    watcher = next(each["sidecar_pid"] for each in before["members"] if 1 in each["ranks"])
    os.kill(watcher, signal.SIGSTOP)  # so that the look takes as long as we need
    run.hit(0, signal.SIGSTOP)
    step = run.wait(lambda status: status["phase"] == "looking", "somebody looks")["ranks"][0]["step"]
    run.hit(0, signal.SIGCONT)
    run.wait(lambda status: status["ranks"][0]["step"] > step, "another step")
    os.kill(watcher, signal.SIGCONT)
    after = run.trains()
    assert (after["generation"], after["incidents"]) == (before["generation"], before["incidents"])
    assert "it went on by itself" in run.logs("supervisor.log")


def test_no_false_alarm_with_uneven_steps_and_declared_pauses(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 1", "uneven.py", 200)
    ended = run.finish(120)
    assert ended.code == 0, ended.output
    assert run.incidents() == []
    assert " is slow" not in ended.output
