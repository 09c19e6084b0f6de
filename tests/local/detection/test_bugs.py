"""A bug in the script is not a fault: the run ends with the script's message and exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

VICTIM = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")


def test_the_same_failure_three_times_ends_the_run_with_its_traceback(start: Start) -> None:
    run = start("--members 2", "fails_always.py", "raise")
    ended = run.finish()
    assert ended.code == 1
    found = run.incidents()
    assert [(each["kind"], each["rank"], each["step"]) for each in found] == [("exception", 1, 7)] * 3
    assert found[-1]["remedy"] == "stop"
    assert not any(each["open"] for each in found)
    told = "\n".join(line for line in ended.lines if not line.startswith("["))
    assert told.count("OutOfOrder: step 7 never works") >= 1
    assert "fails_always.py" in told
    assert not any(sign in told for sign in VICTIM)


def test_a_collective_that_one_rank_enters_alone_is_a_bug_and_no_lost_peer(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "alone.py").write_text(
        "import torch, holdfast\n"
        "model = torch.nn.Linear(8, 1)\n"
        "session = holdfast.join()\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "state = session.protect(model=model, optimizer=optimizer)\n"
        "for step in state.steps(200):\n"
        "    ddp(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    state.commit()\n"
        "    if step == 40 and session.rank == 0:\n"
        "        with state.pause('eval'):\n"
        "            torch.distributed.all_reduce(torch.ones(1))\n"
    )
    run = start("--nproc-per-node 2", "alone.py")
    ended = run.finish()
    assert ended.code != 0
    found = run.incidents()
    assert [(each["kind"] in ("crash", "exception"), each["rank"]) for each in found] == [(True, 0)] * 3
    assert "its collective does not match another rank's" in ended.lines[-1]
    assert "the same failure 3 times" in ended.lines[-1]


def test_a_traceback_names_the_script_as_the_interpreter_does_and_explain_names_the_line(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(
        "import os\nimport holdfast\nholdfast.join()\nos.chdir('/')\n1 / 0  # the bug\n"
    )
    run = start("", "wrong.py")
    ended = run.finish()
    assert ended.code == 1
    plain = subprocess.run(
        [sys.executable, run.folder / "wrong.py"], cwd=run.folder, capture_output=True, text=True, check=False
    )
    where = f'  File "{run.folder / "wrong.py"}", line 5, in <module>'
    assert where in plain.stderr
    assert where in ended.output
    assert "1 / 0  # the bug" in ended.output
    told = holdfast("explain", "last", "--run-dir", run.run_dir, cwd=run.folder)
    first = told.lines[0].partition("  ")[2]
    assert first == "rank 0 raised ZeroDivisionError: division by zero at step 0 (wrong.py, line 5)"


@pytest.mark.parametrize(("options", "who", "times"), [("", "all", 2), ("--members 2", "one", 3)])
def test_a_programming_error_on_all_ranks_is_retried_once_and_on_one_rank_twice(
    start: Start, options: str, who: str, times: int
) -> None:
    run = start(options, "missing_name.py", who)
    ended = run.finish()
    assert ended.code == 1
    assert f"the same failure {times} times at step 7; this is a bug, not a fault" in ended.lines[-1]
    assert len(run.incidents()) == times


def test_a_deliberate_exit_code_becomes_the_exit_code_of_the_run(start: Start) -> None:
    run = start("--nproc-per-node 2", "fails_always.py", "exit")
    assert run.finish().code == 3
    assert len(run.incidents()) == 1
    assert run.last_status()["generation"] == 1, "the run was restarted"


def test_a_connection_error_on_all_ranks_is_a_bug_with_its_traceback(start: Start) -> None:
    """The run once reported that all ranks had lost their peers, because torch uses this text for that."""
    run = start("--members 2", "fails_always.py", "reset")
    ended = run.finish()
    assert ended.code == 1
    assert [(each["kind"], each["step"]) for each in run.incidents()] == [("exception", 7)] * 3
    told = "\n".join(line for line in ended.lines if not line.startswith("["))
    assert "RuntimeError: reading s3://corpus/7: Connection reset by peer" in told
    assert 'fails_always.py", line' in told


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_the_scripts_reaction_to_a_lost_peer_does_not_end_the_run(
    start: Start, tmp_path: Path, how: str
) -> None:
    """The launcher sees the peer's end later, so this exit once counted as deliberate and as the cause."""
    run = start("--members 2", "exits_with_code.py", tmp_path, how)
    ended = run.finish()
    assert ended.code == 0, ended.output
    [found] = run.incidents()
    assert (found["kind"], found["rank"], found["step"]) == ("crash", 1, 7)


def test_failures_of_many_ranks_with_long_messages_are_all_reported(start: Start, tmp_path: Path) -> None:
    """The JSON of 64 such reports exceeds a socket's buffer, and the run once never ended."""
    script = tmp_path / "many.sh"
    script.write_text(f"#!/bin/sh\nfor i in {'1 ' * 40}; do echo {'│' * 40}; done\nsleep 2\nexit 7\n")
    script.chmod(0o755)
    run = start("--nproc-per-node 64 --plain --max-restarts 0", script)
    ended = run.finish()
    assert ended.code == 7, ended.output
    [incident] = run.incidents()
    assert incident["message"].endswith("│\n")
    assert all("exited with code 7" in each["detail"] and each["message"] for each in incident["faults"])
    assert "launcher refused" not in run.logs("sidecar-*.log")


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("raise", 1)])
def test_a_child_that_the_script_forks_is_not_mistaken_for_the_rank(
    start: Start, how: str, code: int
) -> None:
    """The failure of such a child once ended a healthy run, or rolled it back three times."""
    run = start("--nproc-per-node 2", "forks_child.py", how)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert run.incidents() == []
    assert f"the child's code: {code}" in ended.output
    assert ended.output.count("ZeroDivisionError: in the child") == (how == "raise")


def test_a_syntax_error_is_shown_once_before_any_process_starts(start: Start, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import holdfast\nwhile True print(1)\n")
    run = start("--members 2", "wrong.py")
    ended = run.finish()
    assert ended.code == 1
    assert ended.output.count("SyntaxError") == 1
    assert "line 2" in ended.output
    assert not run.run_dir.exists(), "a process was started for it"


def test_an_import_that_fails_is_shown_with_its_traceback(start: Start, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import holdfast\nimport no_such_module\nholdfast.join()\n")
    ended = start("--nproc-per-node 2", "wrong.py").finish()
    assert ended.code == 1
    assert "No module named 'no_such_module'" in ended.output


@pytest.mark.parametrize("code", [0, 5])
def test_a_script_that_ends_before_it_joins_is_no_fault(start: Start, code: int) -> None:
    run = start("--nproc-per-node 2", "exits_before_join.py", code)
    ended = run.finish()
    assert ended.code == code
    assert "usage: exits_before_join.py CODE" in ended.output
    assert run.incidents() == []


def test_a_script_imports_the_users_modules_instead_of_the_parts(start: Start) -> None:
    ended = start("", "user_modules/train.py").finish()
    assert ended.code == 0, ended.output
    assert "trainer is theirs and sidecar is theirs" in ended.output


def test_megabytes_of_output_are_logged_completely(start: Start) -> None:
    run = start("--nproc-per-node 2", "prints_often.py", 100, 300)
    ended = run.finish()
    assert ended.code == 0
    for rank in (0, 1):
        lines = run.logs(f"gen-0001/rank-{rank}.log").splitlines()
        assert len([line for line in lines if line.startswith(f"{rank} ")]) == 100 * 300
    assert "1 99 xxx" in ended.output
    assert "not shown" not in ended.output
    for rank in (0, 1):
        assert ended.output.count(f"[rank {rank}] {rank} ") == 100 * 300


def test_a_script_that_does_not_use_holdfast_is_restarted(start: Start) -> None:
    run = start("--nproc-per-node 2", "unjoined.py", 1500)
    run.steady()
    found = run.broken(lambda: run.hit(1, signal.SIGKILL))
    assert (found["kind"], found["rank"]) == ("crash", 1)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert "rank 0 of 2 is done" in ended.output
    assert "rank 1 of 2 is done" in ended.output
    status = run.last_status()  # what was trained before the kill may have been trained again
    assert (status["ettr"], status["ettr_hour"], status["secured_step"]) == (None, None, None)
    assert (found["lost_steps"], found["own_state"], status["pending_s"]) == (None, True, 0.0)
    assert min(status["buckets_s"]["unknown"], status["buckets_s"]["productive"]) > 0
    shown = holdfast("status", "--run-dir", run.run_dir, cwd=run.folder)
    assert "ETTR        unknown (the script keeps its own state)" in shown.output
    table = holdfast("incidents", "--run-dir", run.run_dir, cwd=run.folder)
    assert "?  restart" in table.output
