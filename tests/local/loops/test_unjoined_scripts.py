"""Scripts that do not use holdfast: how they start and end, and what they may do without a step."""

from __future__ import annotations

import signal

import pytest

from tests.local.conftest import Start
from tests.local.waiting import START_S, until
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

FIRST_STEP_S = 6.0  # more than the longest time between two looks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_does_no_step_is_done_to_its_end_however_long_it_works(
    start: Start, ranks: int
) -> None:
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
def test_a_stop_is_heard_by_the_script_as_at_a_terminal_and_it_has_the_time_to_save(
    start: Start, options: str, how: str, by: signal.Signals | None, saved_on: str
) -> None:
    """`by` is the signal that `holdfast run` gets; None for `holdfast stop`."""
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
    assert ended.output.count("saved on") == 2, "once, whatever comes after"
    assert "saving a checkpoint" not in ended.output
    assert "securing" not in ended.output


def test_two_signals_end_a_script_at_once_that_takes_its_time_to_save(start: Start) -> None:
    run = start("--nproc-per-node 2 --grace 1h", "unjoined_saves_when_asked.py", "deaf")
    until(lambda: run.output().count("] ready") == 2 or None, "both ranks are ready", START_S)
    run.interrupt()
    until(lambda: "stopping" in run.output() or None, "the first is heard", START_S)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130, ended.output
    assert "saved on" not in ended.output


def test_ranks_that_hear_no_signal_are_killed_when_their_time_is_over(start: Start) -> None:
    run = start("--nproc-per-node 2 --grace 1s", "unjoined_saves_when_asked.py", "stubborn")
    until(lambda: run.output().count("] ready") == 2 or None, "both ranks are ready", START_S)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130, ended.output
    assert "saved on" not in ended.output
    assert ended.lines[-1].startswith("holdfast: stopped, as asked; the script keeps its own state")


def test_ranks_of_which_none_waits_for_another_are_no_hang_however_long_that_takes(start: Start) -> None:
    """All wait for new data, and then each evaluates its own part: four times the limit and more."""
    ended = start("--nproc-per-node 2 --stall-limit 2s", "unjoined_independent.py", 8).finish()
    assert ended.code == 0, ended.output
    assert "incident" not in ended.output
    assert ended.output.count("is done, restarted 0 times") == 2, ended.output
    assert ended.output.count("no rank waits for another, so it is left alone") == 1, ended.output
