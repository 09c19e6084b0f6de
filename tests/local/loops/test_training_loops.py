"""Loops in the style of popular projects end with identical weights after faults of ranks and members."""

from __future__ import annotations

import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

STEPS = 300
LOOPS = {
    "master_weights": "float32 masters beside a bfloat16 model",
    "mixed_precision plain": "mixed precision, steps that are skipped",
    "mixed_precision fused": "the same with an optimizer that skips by itself",
    "gan": "two optimizers",
    "weight_average": "averages, swapped in for an evaluation",
    "sam": "weights that are moved and put back within a step",
    "lora_adapter": "frozen parameters, activation checkpointing",
    "own_sampler": "a sampler with a generator of its own",
    "frozen_layers": "layers that are frozen in a step",
    "compiled": "torch.compile",
    "loader_workers fork": "new loader workers in each epoch",
    "loader_workers persistent": "loader workers that stay",
    "loader_workers spawn": "loader workers that are spawned",
    "stream_epochs": "an iterable dataset with state, epochs, gradient accumulation",
}


def train(start: Start, options: str, loop: str, into: Path, quiet: Path) -> Run:
    name, *words = loop.split()
    script = Path("loops") / f"{name}.py"
    return start(options, str(script), STEPS, into / "digest", quiet, *words, into=into.name)


def strike(run: Run, fault: str, rank: int) -> None:
    if fault == "kill":
        run.hit(rank, signal.SIGKILL)
    else:
        run.inject(fault, rank)


def digests(folder: Path) -> list[Json]:
    return [json.loads((folder / f"digest.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_common_training_loop_ends_with_the_same_bits(start: Start, loop: str, tmp_path: Path) -> None:
    chance = random.Random(loop)
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    quiet = {True: tmp_path / "quiet", False: tmp_path / "calm.quiet"}
    quiet[False].touch()
    whole = train(start, "--nproc-per-node 2 --checkpoint-every 0", loop, calm, quiet[False])
    run = train(start, "--members 2 --standby 1 --checkpoint-every 1s", loop, broken, quiet[True])
    run.steady(5)
    for fault in ("kill", "member", "kill"):
        run.reach(int(run.running()["step"]) + chance.randrange(1, 12))
        run.broken(partial(strike, run, fault, chance.randrange(2)))
    quiet[True].touch()
    ended = run.finish()
    # A kill may interrupt an evaluation that no older state is left to repeat from: the run then reports it.
    undone = run.last_status()["cut_short"] if loop == "weight_average" else []
    assert ended.code == (3 if undone else 0), ended.output
    assert all(each["step"] % 10 == 0 for each in undone), undone
    found = run.incidents()
    assert [each["kind"] for each in found] == ["crash", "member_lost", "crash"], ended.output
    assert whole.finish().code == 0
    assert digests(broken) == digests(calm), ended.output
    assert "scaler moved on" not in ended.output, "its first scale() only creates tensors"


def test_weights_swapped_in_for_an_evaluation_are_not_secured_when_a_peer_dies(
    start: Start, tmp_path: Path
) -> None:
    broken, calm = tmp_path / "broken", tmp_path / "calm"
    run = train(
        start, "--nproc-per-node 2 --checkpoint-every 0", "weight_average alone", broken, tmp_path / "quiet"
    )
    run.steady(30)
    place = broken / "evaluating-0"
    for _ in range(3):
        pid = run.pid(1)
        place.unlink(missing_ok=True)
        until(lambda: True if place.exists() else None, "an evaluation", WAIT_S)
        found = run.broken(partial(os.kill, pid, signal.SIGKILL))
        assert found["lost_steps"] <= 1, found
    (tmp_path / "quiet").touch()
    assert run.finish().code == 0
    whole = train(
        start, "--nproc-per-node 2 --checkpoint-every 0", "weight_average alone", calm, tmp_path / "quiet"
    )
    assert whole.finish().code == 0
    assert digests(broken) == digests(calm)
