"""A run leaves nothing behind, however it ends. An interrupted run resumes where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import SCRIPTS, Json, Run
from tests.local.waiting import START_S, WAIT_S, until
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

ENDLESS = 10_000_000


def checkpoints(run: Run) -> list[Json]:
    shown = holdfast("checkpoints", "--verify", "--json", "--run-dir", run.run_dir, cwd=run.folder)
    assert shown.code == 0, shown.output
    found = json.loads(shown.output)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_one_signal_saves_the_newest_step_and_ends_cleanly(start: Start, signum: int) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", ENDLESS)
    step = run.steady()["step"]
    run.interrupt(signum)
    if signum == signal.SIGUSR1:  # as a batch system sends them when the announced time is over
        for after in (signal.SIGUSR1, signal.SIGTERM):
            run.interrupt(after)
    ended = run.finish()
    assert ended.code == 130
    assert max(each["step"] for each in checkpoints(run)) >= step
    assert "checkpoint of step" in ended.lines[-1]
    assert run.incidents() == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_pid_and_then_to_its_group_is_one_request(start: Start, signum: int) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", ENDLESS)
    step = run.steady()["step"]
    run.interrupt(signum)
    until(lambda: "press Ctrl-C again" in run.output() or None, "the first to be handled", WAIT_S)
    os.killpg(run.process.pid, signum)
    os.killpg(run.process.pid, signal.SIGTERM)
    ended = run.finish()
    assert ended.code == 130
    assert max(each["step"] for each in checkpoints(run)) >= step
    assert "with a checkpoint of step" in ended.lines[-1]


def test_timeout_of_coreutils_leaves_a_checkpoint(tmp_path: Path) -> None:
    """`timeout` signals its child, and then its own process group. It does the same if it is signalled."""
    command = (sys.executable, "-m", "holdfast", "run", "--run-dir", "run", str(SCRIPTS / "steady.py"))
    with (tmp_path / "output.txt").open("w+") as output:
        timed = ("timeout", "100", *command, str(ENDLESS))
        running = subprocess.Popen(timed, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
        until(lambda: (done(tmp_path / "run") or 0) > 3 or None, "a step", START_S)
        running.send_signal(signal.SIGTERM)
        running.wait(WAIT_S)
        output.seek(0)
        last = output.read().splitlines()[-1]
    assert "with a checkpoint of step" in last


def done(run_dir: Path) -> int | None:
    """Return the step in the run's last status; None if there is none yet."""
    try:
        step = json.loads((run_dir / "status.json").read_text())["step"]
    except (OSError, ValueError, KeyError):
        return None
    return step if isinstance(step, int) else None


def test_a_background_job_of_a_shell_is_stopped_by_sigquit_too(tmp_path: Path) -> None:
    """A shell without job control has its background jobs ignore SIGINT and SIGQUIT."""
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        run = Run(tmp_path, "--checkpoint-every 0", [SCRIPTS / "steady.py", str(ENDLESS)])
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        run.steady()
        run.interrupt(signal.SIGQUIT)
        assert run.finish().code == 130
    finally:
        run.kill()


def test_two_signals_end_the_run_at_once(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", ENDLESS)
    run.steady()
    assert run.stop().code == 130


def test_a_rank_that_dies_after_the_others_have_exited_repeats_its_work_after_the_loop(
    start: Start, tmp_path: Path
) -> None:
    """Memory holds the last two states. The rank resumes from the older one to repeat the work."""
    options = "--members 2 --snapshot-every 64 --checkpoint-every 0"
    run = start(options, "work_after_loop.py", 200, tmp_path / "marker")
    run.wait(lambda s: [r["state"] for r in s["ranks"] if r["rank"] == 1] == ["exited"], "rank 1 to exit")
    there = run.wait(lambda s: s["updated"] > 0, "a status")["updated"]
    run.wait(lambda s: s["updated"] > there + 1.0, "rank 0 to be there for longer than a step takes")
    run.hit(0, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    [found] = run.incidents()
    assert (found["kind"], found["rank"], found["lost_steps"]) == ("crash", 0, 8)
    assert found["resume"]["step"] == 192
    [cut] = found["cut_short"]
    assert (cut["rank"], cut["step"], cut["again"]) == (0, 200, True)


def test_a_killed_run_leaves_nothing_behind(start: Start) -> None:
    run = start("--members 2", "steady.py", ENDLESS)
    run.steady()
    run.interrupt(signal.SIGKILL)
    assert run.finish().code == -signal.SIGKILL


def test_a_run_that_is_killed_while_it_starts_leaves_nothing_behind(start: Start) -> None:
    run = start("--members 2", "steady.py", ENDLESS)
    run.wait(lambda s: len(s["members"]) == 2, "two members")
    run.interrupt(signal.SIGKILL)
    assert run.finish().code == -signal.SIGKILL


def test_an_interrupted_run_resumes_and_ends_with_the_undisturbed_state(start: Start, tmp_path: Path) -> None:
    words = ("steady.py", 300, 64, 5)
    first = start("--nproc-per-node 2", *words, tmp_path / "first", into="a")
    step = first.steady(50)["step"]
    first.interrupt()
    assert first.finish().code == 130
    second = start("--nproc-per-node 2", *words, tmp_path / "second", into="a")
    assert second.wait(lambda s: s["step"] is not None, "a step")["step"] >= step
    assert second.finish().code == 0
    whole = start("--nproc-per-node 2", *words[:3], 0, tmp_path / "whole", into="b")
    assert whole.finish().code == 0
    for rank in (0, 1):
        assert read(tmp_path / f"second.{rank}") == read(tmp_path / f"whole.{rank}")
    assert not (tmp_path / "first.0").exists()


def read(path: Path) -> object:
    return json.loads(path.read_text())
