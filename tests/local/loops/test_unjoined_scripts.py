"""Scripts that do not use holdfast: how they start and end, and what they may do without a step."""

from __future__ import annotations

import signal

import pytest

from tests.local.conftest import Start
from tests.local.waiting import START_S, until
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

FIRST_STEP_S = 6.0  # more than the longest time between two inspections


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_without_steps_runs_to_its_end_however_long_it_works(start: Start, ranks: int) -> None:
    options = f"--nproc-per-node {ranks} --first-step-timeout {FIRST_STEP_S:g}s"
    ended = start(options, "unjoined_no_steps.py", 1.5 * FIRST_STEP_S).finish()
    assert ended.code == 0, ended.output
    assert ended.output.count("predicted") == ranks, ended.output
    assert "incident" not in ended.output
    assert ended.output.count("no step of a torch.optim optimizer for") == 1, ended.output


@pytest.mark.parametrize(
    ("options", "how", "by", "saved_on"),
    [
        ("", "interrupt", signal.SIGINT, "SIGINT"),
        ("--warm cold", "interrupt", signal.SIGINT, "SIGINT"),
        ("", "terminate", signal.SIGTERM, "SIGTERM"),
        ("--grace 1s", "deaf", signal.SIGINT, "SIGTERM"),
        ("", "interrupt", None, "SIGINT"),
        ("", "terminate", None, "SIGTERM"),
    ],
)
def test_a_stop_signals_the_script_as_a_terminal_does_and_leaves_it_time_to_save(
    start: Start, options: str, how: str, by: signal.Signals | None, saved_on: str
) -> None:
    """`by` is the signal that `holdfast run` receives, or None for `holdfast stop`."""
    run = start(f"--nproc-per-node 2 {options}", "unjoined_saves_when_asked.py", how)
    until(lambda: run.output().count("] ready") == 2 or None, "both ranks are ready", START_S)
    if by is None:
        stopped = holdfast("stop", "--run-dir", run.run_dir, cwd=run.folder)
        assert stopped.code == 0, stopped.output
        assert "saving" not in stopped.output
        assert "securing" not in stopped.output
    else:
        run.interrupt(by)
    ended = run.finish()
    assert ended.code == 130, ended.output
    assert ended.output.count(f"saved on {saved_on}") == 2, ended.output
    assert ended.output.count("saved on") == 2, "each rank prints it only once"
    assert "saving a checkpoint" not in ended.output
    assert "securing" not in ended.output


def test_a_second_signal_ends_a_script_at_once_despite_its_grace(start: Start) -> None:
    run = start("--nproc-per-node 2 --grace 1h", "unjoined_saves_when_asked.py", "deaf")
    until(lambda: run.output().count("] ready") == 2 or None, "both ranks are ready", START_S)
    run.interrupt()
    until(lambda: "stopping" in run.output() or None, "the first signal is handled", START_S)
    run.interrupt_again()
    ended = run.finish()
    assert ended.code == 130, ended.output
    assert "saved on" not in ended.output


def test_ranks_that_ignore_all_signals_are_killed_after_the_grace(start: Start) -> None:
    run = start("--nproc-per-node 2 --grace 1s", "unjoined_saves_when_asked.py", "stubborn")
    until(lambda: run.output().count("] ready") == 2 or None, "both ranks are ready", START_S)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130, ended.output
    assert "saved on" not in ended.output
    assert ended.lines[-1].startswith("holdfast: stopped as requested; the script keeps its own state")


def test_ranks_that_do_not_wait_for_each_other_are_never_declared_hung(start: Start) -> None:
    """All ranks wait for new data, then each evaluates its own part, for at least four times the limit."""
    ended = start("--nproc-per-node 2 --stall-limit 2s", "unjoined_independent.py", 8).finish()
    assert ended.code == 0, ended.output
    assert "incident" not in ended.output
    assert ended.output.count("is done, restarted 0 times") == 2, ended.output
    assert ended.output.count("no rank waits for another, so it is left alone") == 1, ended.output
