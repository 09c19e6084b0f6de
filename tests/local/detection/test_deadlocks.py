"""Ranks that wait for each other forever are found at once; other waits are left alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.view.model import Policy
from tests.local.conftest import Start
from tests.local.running import ONE_THREAD, SCRIPTS, Json, Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

LOOKED_AT_S = 6.0  # enough for several inspections, and many times the limit for a late step
TWO_PLACES = ("rank 0 in ", "rank 1 in ", "barrier, called by evaluate (waits_for_peers.py:")


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def run(start_shared: Start, orders: Path) -> Iterator[Run]:
    run = start_shared("--members 2 --checkpoint-every 0", "waits_for_peers.py", orders)
    yield run
    assert run.stop().code == 130


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["apart", "paused"])
def test_mismatched_collectives_are_found_at_once_with_the_place_of_each_rank(
    run: Run, orders: Path, how: str, rank: int
) -> None:
    run.steady(30)
    run.trains()  # past the previous incident's step: at that step, a rank would get the full limit
    found = run.broken((orders / f"{how}-{rank}").touch)
    assert (found["kind"], found["rank"]) == ("hang", None), found["why"]
    assert "all ranks wait for each other, and nothing is in transit: " in found["why"]
    assert all(part in found["why"] for part in TWO_PLACES), found["why"]
    assert found["why"].count("All ranks must enter the same collectives in the same order") == 1
    assert found["detected_s"] < Policy().stall_limit_s, (
        "the limit of a pause, half an hour, does not delay it"
    )
    cut = [(each["rank"], each["again"]) for each in found["cut_short"]]
    assert cut == ([(rank, True)] if how == "paused" else []), "a pause counts as work, even behind a barrier"
    assert found["lost_steps"] <= 1 or cut
    seen = [line for line in found["evidence"] if "is repeated" not in line]
    assert seen
    assert all("at rest until its peers send something" in line for line in seen)


def test_slow_steps_in_the_past_do_not_delay_the_restart_of_a_deadlock(run: Run, orders: Path) -> None:
    """They make the limit of the later steps three times as long. Of 256 steps, three determine the p99."""
    run.steady(30)
    incidents = len(run.incidents())
    for _ in range(3):
        (orders / "slow-0").touch()
        held = run.wait(lambda status: (status["no_step_s"] or 0) > LOOKED_AT_S, "a slow step")
        assert held["rate"] is None
        passes(run, held["step"] + 5)
    assert len(run.incidents()) == incidents, run.report()
    limit_s = min(3 * each["p99_s"] for each in run.running()["ranks"])
    assert limit_s > 20.0
    found = run.broken((orders / "apart-1").touch)
    assert (found["kind"], found["rank"]) == ("hang", None), found["why"]
    assert "all ranks wait for each other, and nothing is in transit: " in found["why"]
    assert found["detected_s"] < limit_s / 2, found["timeline"]


def test_a_rank_whose_own_time_limit_ends_its_wait_is_left_alone(start: Start, tmp_path: Path) -> None:
    """Until its wait ends, it looks like any other rank that no peer will ever join."""
    run = start(
        "--members 2 --checkpoint-every 0", "waits_for_peers.py", tmp_path, TRIES_S=str(LOOKED_AT_S + 2)
    )
    run.steady(30)
    (tmp_path / "tries-1").touch()
    held = run.wait(lambda status: (status["no_step_s"] or 0) > LOOKED_AT_S, "nothing moves")
    goes_on(run, held)
    assert (tmp_path / "tried").exists()
    assert run.stop().code == 130


def test_ranks_that_wait_for_a_rank_that_waits_for_an_outside_process_are_left_alone(
    start: Start, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "chain").touch()
    run = start("--nproc-per-node 3 --checkpoint-every 0", "waits_for_peers.py", tmp_path)
    held = run.wait(lambda status: (status["no_step_s"] or 0) > LOOKED_AT_S, "nothing moves")
    assert held["held_up_by"] == 2, held["waiting_for"]
    with (tmp_path / "pipe").open("wb") as pipe:
        pipe.write(b"x")
    goes_on(run, held)
    assert len(list(tmp_path.glob("done-*"))) == 3


def test_ranks_whose_peer_is_no_rank_are_left_alone_while_it_is_stopped(start: Start, tmp_path: Path) -> None:
    """All ranks wait in one collective and nothing is in transit, but a process outside the run ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = SCRIPTS / "outside_rank.py"
    outsider = subprocess.Popen(
        [sys.executable, script, str(port), "2"], env={**os.environ, **ONE_THREAD}, start_new_session=True
    )
    try:
        run = start("--members 2", "outside_rank.py", port)
        run.reach(40)
        outsider.send_signal(signal.SIGSTOP)
        held = run.wait(lambda status: (status["no_step_s"] or 0) > LOOKED_AT_S, "nothing moves")
        assert held["held_up_by"] is None, held["waiting_for"]
        outsider.send_signal(signal.SIGCONT)
        goes_on(run, held)
        assert run.stop().code == 130
    finally:
        outsider.kill()
        outsider.wait()


def passes(run: Run, step: int) -> None:
    run.wait(lambda status: (status["step"] or 0) > step, "training continues")


def goes_on(run: Run, held: Json) -> None:
    passes(run, held["step"] + 20)
    assert run.incidents() == [], run.report()
