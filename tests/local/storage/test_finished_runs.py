"""A finished run leaves its last state. The same command then does nothing; more steps continue from it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import SCRIPTS

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

RANKS = (0, 1)


def steps(folder: Path) -> list[list[int]]:
    """Return the steps that each rank has trained, in all runs so far."""
    return [[int(word) for word in (folder / f"steps.{rank}").read_text().split()] for rank in RANKS]


def digests(folder: Path) -> list[object]:
    return [json.loads((folder / f"digest.{rank}").read_text()) for rank in RANKS]


@pytest.mark.parametrize("members", ["--nproc-per-node 2", "--members 2"])
def test_a_finished_run_repeats_no_step_and_continues_from_its_end(
    start: Start, tmp_path: Path, members: str
) -> None:
    first = start(members, "epochs_then_work.py", tmp_path, 2, "plain").finish()
    last = "holdfast: all ranks have finished, with a checkpoint of step 40 (exit code 0)"
    assert (first.code, first.lines[-1]) == (0, last)
    again = start(f"{members} --resume", "epochs_then_work.py", tmp_path, 2, "plain").finish()
    assert again.code == 0, again.output
    assert "nothing to do: the state in" in again.output
    assert "trained again" not in again.output
    assert steps(tmp_path) == [[*range(40)]] * 2
    more = start(f"{members} --resume", "epochs_then_work.py", tmp_path, 3, "plain").finish()
    assert more.code == 0, more.output
    assert "from step 40 (checkpoint)" in more.output
    assert steps(tmp_path) == [[*range(60)]] * 2
    ended = digests(tmp_path)
    (whole := tmp_path / "whole").mkdir()
    assert start(members, "epochs_then_work.py", whole, 3, "plain", into="other").finish().code == 0
    assert ended == digests(whole)


def test_the_last_state_gets_a_checkpoint_if_one_rank_ends_while_another_copies_it(
    start: Start,
) -> None:
    ended = start("--nproc-per-node 4 --snapshot-every 16", "large_state.py", 80).finish()
    last = "holdfast: all ranks have finished, with a checkpoint of step 40 (exit code 0)"
    assert (ended.code, ended.lines[-1]) == (0, last), ended.output


def test_a_script_that_a_shell_starts_leaves_a_last_checkpoint(start: Start, tmp_path: Path) -> None:
    script = f"{sys.executable} {SCRIPTS / 'epochs_then_work.py'} {tmp_path} 1 plain; echo done"
    ended = start("--nproc-per-node 2", "bash", "-c", script).finish()
    last = "holdfast: all ranks have finished, with a checkpoint of step 20 (exit code 0)"
    assert (ended.code, ended.lines[-1]) == (0, last), ended.output


def test_a_cold_script_leaves_a_last_checkpoint_and_its_state_when_a_peer_dies(start: Start) -> None:
    run = start("--nproc-per-node 2 --warm cold --snapshot-every 1024", "steady.py", 150)
    run.reach(40)
    assert run.broken(lambda: run.hit(1, signal.SIGKILL))["lost_steps"] <= 1
    ended = run.finish()
    last = "holdfast: all ranks have finished after 1 incident, with a checkpoint of step 150 (exit code 0)"
    assert (ended.code, ended.lines[-1]) == (0, last), ended.output


def test_a_script_that_exits_at_once_is_warned_that_its_last_steps_have_no_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    run = start("--nproc-per-node 2", "epochs_then_work.py", tmp_path, 1, "at_once")
    ended = run.finish()
    assert ended.code == 0, ended.output
    missing = "no checkpoint of step 20 could be written: rank 0 ended without a report"
    assert missing in ended.lines[-1]
    assert any(each.startswith(missing) for each in run.last_status()["warnings"])


def test_the_last_line_says_how_many_steps_a_script_did_that_ended_early(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(
        "import sys, torch, holdfast\n"
        "model = torch.nn.Linear(8, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "state = holdfast.join().protect(model=model, optimizer=optimizer)\n"
        "for step in state.steps(500):\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    state.commit()\n"
        "    if step == 60:\n"
        "        sys.exit(0)\n"
    )
    ended = start("--checkpoint-every 0", "leaves.py").finish()
    line = "holdfast: all ranks have finished, after 61 of 500 steps, without a checkpoint (exit code 0)"
    assert (ended.code, ended.lines[-1]) == (0, line), ended.output


@pytest.mark.parametrize(("option", "how"), [("", "weights"), ("--checkpoint-every 0", "plain")])
def test_without_a_last_checkpoint_the_run_says_that_steps_are_repeated(
    start: Start, tmp_path: Path, option: str, how: str
) -> None:
    first = start(f"--nproc-per-node 2 {option}", "epochs_then_work.py", tmp_path, 1, how)
    ended = first.finish()
    assert ended.code == 0, ended.output
    assert first.last_status()["checkpoint"] is None
    again = start(f"--nproc-per-node 2 --resume {option}", "epochs_then_work.py", tmp_path, 1, how).finish()
    assert again.code == 0, again.output
    assert (
        "already finished, at step 20; it has no checkpoint, so the later steps will be trained again"
        in again.output
    )
    assert steps(tmp_path) == [[*range(20), *range(20)]] * 2


def test_storage_that_cannot_be_written_at_the_end_changes_no_exit_code(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2", "epochs_then_work.py", tmp_path, 1, "plain")
    run.wait(lambda status: status["members"], "members")
    (checkpoints := run.run_dir / "checkpoints").mkdir(exist_ok=True)
    checkpoints.rmdir()
    checkpoints.write_text("no folder")
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert "all ranks have finished" in ended.lines[-1]


def test_output_that_a_rank_cannot_write_at_its_end_sets_the_interpreters_exit_code_and_is_no_fault(
    start: Start,
) -> None:
    run = start("--nproc-per-node 2", "failing_output.py", 1)
    ended = run.finish()
    assert ended.code == 120, ended.output
    assert run.incidents() == []
    assert "rank 1 could not write all of its output: OSError: [Errno 28]" in ended.lines[-1]
    assert run.last_status()["generation"] == 1
