"""Unmodified loops of other libraries are killed, stopped and resumed, and end with the right result.

They resume from their own checkpoints. Each test expects what the library promises for a resumed run. The
Trainer of transformers restores random states and the order of its data, and ends with the weights of an
undisturbed run. Lightning repeats the epoch in which it stopped. A loop that draws random batches draws other
batches after it resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import START_S, WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).with_name("scripts")
OPTIONS = "--nproc-per-node 2 --plain"


@dataclass(frozen=True, slots=True)
class Loop:
    """A script, its arguments, and a function that returns the step of its newest checkpoint, or -1."""

    script: str
    args: tuple[object, ...]
    saved: Callable[[Path], int]

    def start(self, start: Start, into: str) -> Run:
        return start(OPTIONS, str(SCRIPTS / self.script), *self.args, into=into)


def of_own_loop(folder: Path) -> int:
    try:
        return int(torch.load(folder / "out" / "ckpt.pt")["iter_num"])
    except FileNotFoundError:
        return -1


def of_transformers(folder: Path) -> int:
    whole = (folder / "out").glob("checkpoint-*/trainer_state.json")  # the last file that a save writes
    return max((int(path.parent.name.partition("-")[2]) for path in whole), default=-1)


def of_lightning(folder: Path) -> int:
    try:
        return int(torch.load(folder / "out" / "last.ckpt", weights_only=False)["global_step"])
    except (FileNotFoundError, RuntimeError, EOFError):  # the file is being written
        return -1


OWN = Loop("own_loop.py", ("--max_iters=200", "--eval_interval=40"), of_own_loop)
TRANSFORMERS = Loop("hf_trainer.py", ("out", 200, 40), of_transformers)
LIGHTNING = Loop("lit.py", ("out", 200, 40), of_lightning)


def beyond(loop: Loop, run: Run, step: int) -> int:
    """Wait until all ranks have completed a checkpoint beyond `step`, and return its step."""

    def look() -> int | None:
        assert run.process.poll() is None, run.report()
        newest = loop.saved(run.folder)
        return newest if newest > step else None

    found = until(look, f"a checkpoint beyond step {step}", START_S + WAIT_S)
    done = run.running()["step"]
    run.reach(done + 2)
    return found


def broken(loop: Loop, start: Start) -> Run:
    """Kill each rank once, stop the run, resume it by the same command, and return the finished run."""
    run = loop.start(start, "broken")
    run.steady(1)
    saved = 0
    for rank in (1, 0):
        saved = beyond(loop, run, saved)
        found = run.broken(partial(run.inject, "kill", rank))
        assert (found["kind"], found["rank"]) == ("crash", rank)
    beyond(loop, run, saved)
    run.interrupt()
    assert run.finish().code == 130
    again = loop.start(start, "broken")
    ended = again.finish(START_S + WAIT_S)
    assert ended.code == 0, ended.output
    assert again.incidents() == []
    return again


def test_a_single_file_loop_ends_at_its_step_with_a_model_that_has_learned(start: Start) -> None:
    run = broken(OWN, start)
    output = run.output()
    assert output.count("resuming from out at iter ") == 6, "two ranks resume three times"
    ended = torch.load(run.folder / "out" / "ckpt.pt")
    assert ended["iter_num"] == 200
    assert ended["loss"] < 0.6, "an untrained model has 4.2"


def test_the_trainer_of_transformers_ends_with_the_weights_of_an_undisturbed_run(start: Start) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make extras")
    pytest.importorskip("accelerate", reason="accelerate is not installed: make extras")
    calm = TRANSFORMERS.start(start, "calm")
    assert calm.finish(START_S + WAIT_S).code == 0, calm.output()
    run = broken(TRANSFORMERS, start)
    states = [json.loads((each.folder / "out" / "trainer_state.json").read_text()) for each in (calm, run)]
    assert [state["global_step"] for state in states] == [200, 200]
    [undisturbed, resumed] = [
        (each.folder / "out" / "model.safetensors").read_bytes() for each in (calm, run)
    ]
    assert undisturbed == resumed


def test_lightning_ends_at_its_step_with_a_model_that_has_learned(start: Start) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: make extras")
    run = broken(LIGHTNING, start)
    ended = json.loads((run.folder / "out" / "result.json").read_text())
    assert ended["step"] == 200
    assert ended["world_size"] == 2
    assert ended["loss"] < 0.5, "an untrained model has 16"


@pytest.mark.parametrize(("options", "nodes"), [("--members 2", 2), ("--nproc-per-node 2", 1)])
def test_lightning_uses_the_world_size_of_the_launcher(start: Start, options: str, nodes: int) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: make extras")
    run = start(options, str(SCRIPTS / "lit.py"), "out", 20, 10, nodes)
    ended = run.finish(START_S + WAIT_S)
    assert ended.code == 0, ended.output
    assert json.loads((run.folder / "out" / "result.json").read_text())["world_size"] == 2


def test_lightning_refuses_a_different_world_size_as_under_torchrun(start: Start) -> None:
    """Lightning once failed to recognize the launcher: with two devices, one rank waited for a second one."""
    pytest.importorskip("lightning", reason="lightning is not installed: make extras")
    ended = start("--nproc-per-node 1", str(SCRIPTS / "lit.py"), "out", 20, 10).finish(START_S + WAIT_S)
    assert ended.code == 1
    assert "does not match the world size (1)" in ended.output
