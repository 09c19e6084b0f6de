"""The script is edited during the run: all ranks execute the version that the run began with."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

SCRIPT = """
import os, torch, helper, holdfast
VERSION = "one"
model = torch.nn.Linear(2, 1)
session = holdfast.join()
state = session.protect(model=model)
print("version", VERSION, "in generation", session.generation, flush=True)
for step in state.steps(100_000):
    state.commit(loss=model(torch.ones(2)).sum())
"""


def edited(start: Start, folder: Path, options: str, *command: str, text: str) -> Run:
    """Return a run whose script was changed to `text` after its first steps, and which has warned of it."""
    (folder / "helper.py").write_text("A = 1\n")
    (folder / "train.py").write_text(SCRIPT)
    run = start(options, sys.executable, *command)
    run.trains(1)
    (folder / "train.py").write_text(text)
    (folder / "helper.py").write_text("A = 2\n")
    run.wait(lambda status: names(status) == ["helper.py", "train.py"], "a warning about each file")
    return run


def names(status: Json) -> list[str]:
    return sorted(each.partition(" has changed since the run began: ")[0] for each in status["warnings"])


def ended(run: Run, generations: int, ranks: int) -> None:
    """End the run; assert that all ranks in all generations have executed the first version."""
    run.trains(1)
    ended = run.stop()
    said = sorted(line.partition("version ")[2] for line in ended.lines if " in generation " in line)
    assert said == [f"one in generation {n + 1}" for n in range(generations) for _ in range(ranks)]
    for name in names(run.last_status()):
        assert ended.output.count(f"holdfast: {name} has changed") == 1, ended.output


def test_new_processes_of_a_group_execute_the_version_of_the_others(start: Start, tmp_path: Path) -> None:
    """Previously, processes that were warm before the edit ran the old version and all others the new one."""
    run = edited(
        start, tmp_path, "--members 2 --standby 1", "train.py", text=SCRIPT.replace('"one"', '"two"')
    )
    run.steady()
    run.broken(lambda: run.hit(0, signal.SIGKILL))
    run.steady()
    run.broken(lambda: run.inject("member", 1))
    ended(run, generations=3, ranks=2)


def test_a_broken_edit_does_not_end_a_run_without_warm_processes(start: Start, tmp_path: Path) -> None:
    run = edited(start, tmp_path, "--warm cold", "-m", "train", text="for in in\n")
    run.broken(lambda: run.hit(0, signal.SIGKILL))
    ended(run, generations=2, ranks=1)
