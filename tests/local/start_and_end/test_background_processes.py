"""Processes that ranks start in the background end with their rank, and not before it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from bench.harness.launchers import holdfast_run, launch
from holdfast.process import linux
from tests.local.conftest import Start
from tests.local.running import SCRIPTS
from tests.local.waiting import START_S, WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


def test_a_helper_in_the_background_lives_as_long_as_its_rank(start: Start, tmp_path: Path) -> None:
    """It was once killed at the group's first step, as if a dead rank had left it behind."""
    run = start("--nproc-per-node 2", "background_helper.py", tmp_path, 300)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (tmp_path / "alive").exists()


def test_the_workers_of_a_killed_rank_are_ended(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2", "background_helper.py", tmp_path, 10_000_000)
    run.steady()
    until((tmp_path / "workers.1").exists, "the workers of rank 1", WAIT_S)
    workers = [int(word) for word in (tmp_path / "workers.1").read_text().split()]
    run.broken(lambda: run.hit(1, signal.SIGKILL))
    until(lambda: all(linux.state_of(pid)[0] in "ZX" for pid in workers) or None, "their end", WAIT_S)
    assert run.stop().code == 130


def test_two_simultaneous_reports_of_a_ranks_end_do_not_harm_the_launcher(
    start: Start, tmp_path: Path
) -> None:
    """Workers keep their rank's socket open, so its end is usually seen first. Here, both come together."""
    run = start("--nproc-per-node 2", "background_helper.py", tmp_path, 10_000_000)
    status = run.steady()
    until((tmp_path / "workers.1").exists, "the workers of rank 1", WAIT_S)
    workers = [int(word) for word in (tmp_path / "workers.1").read_text().split()]
    launcher = status["members"][0]["launcher_pid"]

    def all_at_once() -> None:
        for pid in (*workers, launcher):
            os.kill(pid, signal.SIGSTOP)
        until(lambda: linux.state_of(launcher)[0] == "T" or None, "a launcher that is stopped", WAIT_S)
        rank = run.pid(1)
        os.kill(rank, signal.SIGKILL)
        until(lambda: linux.state_of(rank)[0] in "ZX" or None, "the end of rank 1", WAIT_S)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(linux.state_of(pid)[0] in "ZX" for pid in workers) or None, "theirs", WAIT_S)
        os.kill(launcher, signal.SIGCONT)

    found = run.broken(all_at_once)
    assert (found["kind"], found["rank"]) == ("crash", 1), found
    assert run.stop().code == 130


def test_a_run_that_a_bench_ends_early_leaves_no_memory_behind() -> None:
    """All its processes are killed together. Previously, no process was left to free the memory."""
    running = launch("left", holdfast_run((), (str(SCRIPTS / "steady.py"), "10000000")))
    try:
        status = running.run_dir / "status.json"
        until(lambda: (status.exists() and json.loads(status.read_text())["step"]) or None, "a step", START_S)
        memory = Path(json.loads((running.run_dir / "run.json").read_text())["runtime"])
        assert memory.exists()
    finally:
        running.close()
    assert not memory.exists()
    assert not running.folder.exists()
