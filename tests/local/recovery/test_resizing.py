"""A run loses a member that is not replaced for a while. It continues with fewer, and grows back later."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

SAMPLES, EPOCHS = 3600, 2
BATCH, LR = 2, 1e-3  # as in the script
OPTIONS = "--members 3 --min-members 2"


@dataclass(frozen=True)
class Step:
    """A step in which a rank has taken part, or was about to when it was stopped."""

    generation: int
    rank: int
    step: int
    epoch: int
    world_size: int
    lr: float
    samples: tuple[int, ...]


def steps_of(folder: Path) -> Iterator[Step]:
    for path in folder.glob("steps-*"):
        rank = int(path.name.rpartition("-")[2])
        for line in path.read_text().splitlines():
            generation, step, epoch, world_size, lr, samples = json.loads(line)
            yield Step(generation, rank, step, epoch, world_size, lr, tuple(samples))


def lasting(folder: Path) -> list[Step]:
    """Return the steps in the final state, each from the newest generation that trained it."""
    found = list(steps_of(folder))
    newest = {each.step: each.generation for each in sorted(found, key=lambda each: each.generation)}
    return [each for each in found if each.generation == newest[each.step]]


def begin(start: Start, how: str, folder: Path, options: str = OPTIONS) -> Run:
    """Start a run of three members, and keep new processes from joining after that."""
    run = start(options, "resizing.py", SAMPLES, EPOCHS, folder, how)
    run.steady()
    (folder / "closed").touch()
    return run


def has_members(status: Json, count: int) -> bool:
    group = status["group"]
    return bool(status["rate"]) and group == {"members": count, "of": 3}


@pytest.mark.parametrize("how", ["hook", "batches"])
def test_a_run_goes_on_with_two_of_three_members_and_grows_back(
    start: Start, tmp_path: Path, how: str
) -> None:
    run = begin(start, how, tmp_path)
    lost = run.broken(lambda: run.inject("member", 1))
    smaller = run.wait(lambda status: has_members(status, 2), "two members")
    assert smaller["world_size"] == 2
    (tmp_path / "closed").unlink()
    run.wait(lambda status: has_members(status, 3), "three members again")
    assert run.finish().code == 0

    shrunk, grown = run.incidents()
    assert shrunk["id"] == lost["id"]
    assert (shrunk["kind"], shrunk["world_size"]) == ("member_lost", {"before": 3, "after": 2})
    assert shrunk["lost_steps"] <= 1
    assert any("no longer bit-equal" in line for line in shrunk["evidence"])
    assert (grown["kind"], grown["world_size"], grown["lost_steps"]) == (
        "growth",
        {"before": 2, "after": 3},
        0,
    )

    steps = lasting(tmp_path)
    for each in steps:
        assert each.lr == pytest.approx(LR * each.world_size / 3 if how == "hook" else LR)
    numbers = {each.step for each in steps}
    assert numbers == set(range(len(numbers)))
    assert run.last_status()["step"] == len(numbers)
    of_step = Counter(each.step for each in steps)
    missing = [each for each in steps if of_step[each.step] != each.world_size]
    assert not missing, "each rank takes part in each step"
    for epoch in range(EPOCHS):
        seen = Counter(sample for each in steps if each.epoch == epoch for sample in each.samples)
        assert set(seen) == set(range(SAMPLES))
        assert seen.total() < SAMPLES + 3 * BATCH, "only the last batch of an epoch is filled up"
    after = {each.step for each in steps_of(tmp_path) if each.generation == 3}
    committed = {int(line) for path in tmp_path.glob("commits-[12]-*") for line in path.read_text().split()}
    assert committed
    assert not after & committed, "the planned stop repeats no committed step"
    if how == "hook":
        told = [(tmp_path / f"resized-{at}").read_text() for at in ("2-0", "2-1", "3-0", "3-1", "3-2")]
        assert told == ["3 2 (3, 2)"] * 2 + ["2 3 (2, 3)"] * 3


def test_a_script_that_needs_its_size_waits_for_the_replacement_and_says_so(
    start: Start, tmp_path: Path
) -> None:
    run = begin(start, "nothing", tmp_path)
    run.wait(lambda _: "--min-members 2 has no effect" in run.output(), "the warning")
    number = run.running()["incidents"] + 1
    run.inject("member", 1)
    waiting = run.wait(
        lambda status: status["phase"] == "securing" and any(m["connected"] for m in status["members"][2:]),
        "the replacement has connected",
    )
    assert waiting["generation"] == 1
    (tmp_path / "closed").unlink()
    run.recovered(number)
    assert run.finish().code == 0
    [incident] = run.incidents()
    assert "world_size" not in incident
    assert {each.world_size for each in steps_of(tmp_path)} == {3}
    assert run.output().count("--min-members 2 has no effect") == 1
    assert "each rank has its own sampler" in run.output()


def test_a_run_that_was_stopped_while_it_was_smaller_resumes_with_all_members(
    start: Start, tmp_path: Path
) -> None:
    options = f"{OPTIONS} --checkpoint-every 1"
    run = begin(start, "batches", tmp_path, options)
    run.inject("member", 1)
    run.wait(lambda status: has_members(status, 2), "two members")
    run.wait(
        lambda status: ((status["checkpoint"] or {}).get("step") or 0) > 100, "a checkpoint of two members"
    )
    run.interrupt()
    assert run.finish().code == 130
    assert "cannot be written" not in run.output()
    stopped = run.last_status()["step"]
    (tmp_path / "closed").unlink()
    again = start(options, "resizing.py", SAMPLES, EPOCHS, tmp_path, "batches")
    again.wait(lambda status: has_members(status, 3), "three members")
    assert again.last_status()["resumed"]["step"] == stopped
    assert again.finish().code == 0
    steps = lasting(tmp_path)
    assert {each.step for each in steps} == set(range(again.last_status()["step"]))
    for epoch in range(EPOCHS):
        seen = Counter(sample for each in steps if each.epoch == epoch for sample in each.samples)
        assert set(seen) == set(range(SAMPLES))
        assert seen.total() < SAMPLES + 3 * BATCH
