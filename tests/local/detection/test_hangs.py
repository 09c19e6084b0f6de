"""Hung ranks are found in time, the right one is named with its stacks, and there are no false alarms."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

ROUNDS = 5  # for each certain kind
STALL_LIMIT_S = 4.0
NATIVE_S = 1.0  # for the native stack of a rank that waits in acquire(), on a busy machine


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def run(start_shared: Start, orders: Path) -> Iterator[Run]:
    options = f"--members 2 --checkpoint-every 0 --stall-limit {STALL_LIMIT_S:g}s"
    run = start_shared(options, "hanging.py", orders)
    yield run
    assert run.stop().code == 130


def stopped(run: Run, _orders: Path, rank: int) -> Callable[[], object]:
    return lambda: run.hit(rank, signal.SIGSTOP)


def by_script(how: str) -> Callable[[Run, Path, int], Callable[[], object]]:
    return lambda _run, orders, rank: (orders / f"{how}-{rank}").touch


CERTAIN = {"stopped": stopped, "absent": by_script("absent"), "lock": by_script("lock")}
MAY_BE_WORK = {
    "loader": ("read_batch (hanging.py:", "a network or a pipe", 1),
    # a worker of its loader hangs, and another one polls
    "poller": ("read_beside_poller (hanging.py:", "work of its child processes", 3),
    "spin": ("spin (hanging.py:", "computing", 3),  # times the limit
}


@pytest.mark.parametrize("turn", range(ROUNDS))
@pytest.mark.parametrize("how", CERTAIN)
def test_a_certain_hang_is_found_within_its_limit_and_its_rank_is_named(
    run: Run, orders: Path, how: str, turn: int
) -> None:
    rank = turn % 2
    before = run.steady(30)  # after fewer steps, the p99 is too unreliable for a strict limit
    found = run.broken(CERTAIN[how](run, orders, rank))
    after = run.running()  # step times span generations, so they show a busy machine
    p99_s = max(each["p99_s"] or 0.0 for each in (*before["ranks"], *after["ranks"]))
    assert (found["kind"], found["rank"]) == ("hang", rank), found["why"]
    native_s = NATIVE_S if how == "lock" else 0.0
    assert found["detected_s"] <= 3 * p99_s + 1 + native_s, (p99_s, found["timeline"])
    assert found["lost_steps"] <= 1
    shown = sorted(each for group in found["stacks"] for each in group["ranks"])
    assert shown == [0, 1], "stacks of all ranks"
    assert found["open"] is False


def _warned(status: Json, place: str) -> bool:
    return any(place in text for text in status["warnings"])


@pytest.mark.parametrize("how", MAY_BE_WORK)
def test_a_wait_that_may_be_work_is_warned_of_and_restarted_at_its_limit(
    run: Run, orders: Path, how: str
) -> None:
    place, work, factor = MAY_BE_WORK[how]
    limit_s = factor * STALL_LIMIT_S
    run.steady(30)
    before = int(run.running()["incidents"])
    by_script(how)(run, orders, 1)()
    stuck = run.wait(lambda status: status["hang_limit_s"] == limit_s and _warned(status, place), "a warning")
    assert (stuck["held_up_by"], stuck["rate"], stuck["incidents"]) == (1, None, before)
    assert place in stuck["waiting_for"]
    assert work in stuck["waiting_for"]
    assert place in stuck["warnings"][-1]
    assert f"Holdfast restarts it at {limit_s:.0f} s" in stuck["warnings"][-1]
    found = run.recovered(before + 1)
    assert (found["kind"], found["rank"], found["lost_steps"]) == ("hang", 1, 0)
    assert found["detected_s"] >= limit_s
    assert f"the limit is {limit_s:.0f} s" in found["why"]
    stacks = "".join(group["stack"] for group in found["stacks"])
    assert place in stacks
    assert "holdfast/worker/script.py" not in stacks, "frames below the script are cut"
    assert f"holdfast: {stuck['warnings'][-1][:40]}" in run.output()


def test_a_rank_that_continues_during_its_inspection_causes_no_incident(run: Run) -> None:
    before = run.steady(30)
    member = next(each for each in before["members"] if 0 in each["ranks"])
    watchers = [member["launcher_pid"], member["sidecar_pid"]]
    for pid in watchers:
        os.kill(pid, signal.SIGSTOP)  # so that no hang can be certain
    run.hit(0, signal.SIGSTOP)
    held = run.wait(lambda status: status["no_step_s"], "rank 1 is late")
    run.hit(0, signal.SIGCONT)
    for pid in watchers:
        os.kill(pid, signal.SIGCONT)
    run.wait(lambda status: status["step"] > held["step"], "another step")
    after = run.trains()
    assert (after["generation"], after["incidents"]) == (before["generation"], before["incidents"])
    assert after["no_step_s"] is None


def test_uneven_steps_and_declared_pauses_cause_no_false_alarm(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 1", "uneven_steps.py", 200)
    ended = run.finish(120)
    assert ended.code == 0, ended.output
    assert run.incidents() == []
    assert " is slow" not in ended.output


def test_a_stopped_rank_is_found_at_any_place_long_before_it_is_late(start: Start, tmp_path: Path) -> None:
    """No rank is late while it joins, in a first step, in a pause or at its end: these may take minutes."""
    run = start("--members 2 --checkpoint-every 0", "stops_itself.py", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    found = run.incidents()
    assert [(each["kind"], each["rank"]) for each in found] == [("hang", 1)] * 4, found
    assert all("stopped (state T)" in each["why"] for each in found)
    assert [each["step"] for each in found[2:]] == [20, 40]


def test_an_unmodified_script_may_evaluate_and_its_stopped_rank_is_found_as_fast(
    start: Start, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    run = start("--members 2", "unjoined_evaluation.py", 6, done)
    run.wait(lambda status: (status["no_step_s"] or 0) > 3, "it evaluates")
    run.wait(lambda status: done.exists() and (status["step"] or 0) > 120, "training continues")
    assert run.incidents() == []
    before = run.steady(120)
    found = run.broken(lambda: run.hit(1, signal.SIGSTOP))
    p99_s = max(each["p99_s"] or 0.0 for each in (*before["ranks"], *run.running()["ranks"]))
    assert (found["kind"], found["rank"]) == ("hang", 1), found["why"]
    assert found["detected_s"] <= 3 * p99_s + 1, (p99_s, found["timeline"])
    assert run.stop().code == 130
