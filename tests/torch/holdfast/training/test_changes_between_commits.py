"""Changes of protected state between two commits are never resumed as the state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.fileio.safetensors import map_file
from holdfast.protocol.launcher_messages import SecureAnswer
from tests.torch.holdfast.training.test_state import LAUNCH, Script, alone, resumed, supervised

torch.set_num_threads(1)


@contextlib.contextmanager
def swapped(script: Script, back: bool = True) -> Iterator[None]:
    kept = [p.data.clone() for p in script.model.parameters()]
    for parameter in script.model.parameters():
        parameter.data.copy_(parameter.data * 0.5 + 0.25)
    yield
    if back:
        for parameter, old in zip(script.model.parameters(), kept, strict=True):
            parameter.data.copy_(old)


def secured(script: Script) -> SecureAnswer:
    assert script.state._protection is not None
    return script.state._protection.snapshot_just_in_time(LAUNCH.generation)


def held(script: Script) -> dict[int, bytes]:
    """Return the weights of the first layer in each snapshot, by step."""
    assert script.state._protection is not None
    found = {}
    for record in script.state._protection.snapshots.arena.records():
        layout, mapping = map_file(record.path)
        with mapping:
            entry = layout["model.0.weight"]
            found[record.step] = mapping[layout.data_offset + entry.begin : layout.data_offset + entry.end]
    return found


def weights(script: Script) -> bytes:
    first = script.model[0]
    assert isinstance(first, torch.nn.Linear)
    return bytes(first.weight.detach().view(-1).view(torch.uint8).tolist())


def test_a_survivor_does_not_secure_weights_that_are_swapped_in_for_a_pause(memory: Path) -> None:
    undisturbed = Script(alone()).run(9).bits()
    launch = replace(LAUNCH, snapshot_every=1000)
    script = Script(supervised(memory, launch)).run(6)
    committed = weights(script)
    with script.state.pause("eval"), swapped(script):
        assert secured(script).whole
        assert held(script)[6] == committed
    assert Script(resumed(memory, script, launch, 6)).run(9).bits() == undisturbed


def test_weights_that_are_swapped_in_without_a_pause_are_refused(memory: Path) -> None:
    script = Script(supervised(memory, LAUNCH)).run(6)
    with swapped(script):
        answer = secured(script)
    assert (answer.step, answer.whole) == (6, False)
    assert answer.why == "parameters were written after the commit of step 6"
    assert 6 not in held(script)


def test_the_state_is_copied_once_for_a_pause_that_only_reads_and_each_time_for_one_that_swaps(
    memory: Path,
) -> None:
    script = Script(supervised(memory, replace(LAUNCH, snapshot_every=1000)))
    copies = []
    for step in script.state.steps(16):
        script.state.commit(loss=script.step())
        if step % 3 == 2:
            with script.state.pause("log"):
                copies.append(("log", step + 1 in held(script)))
        if step % 5 == 4:
            with script.state.pause("eval"):
                copies.append(("eval", step + 1 in held(script)))
                with swapped(script), torch.no_grad():
                    script.model(torch.randn(2, 4))
    assert [kept for label, kept in copies if label == "log"] == [True] + [False] * 4
    assert next(kept for label, kept in copies if label == "eval")


def test_the_state_is_whole_again_after_a_pause_that_swapped_it(memory: Path) -> None:
    script = Script(supervised(memory, replace(LAUNCH, snapshot_every=0))).run(6)
    committed = weights(script)
    with script.state.pause("eval"), swapped(script), torch.no_grad():
        script.model(torch.randn(2, 4))
    assert weights(script) == committed
    assert secured(script).whole
    assert held(script)[6] == committed


def test_weights_that_stay_changed_are_warned_of_and_not_resumed_from(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, replace(LAUNCH, snapshot_every=0))).run(6)
    with script.state.pause("eval"), swapped(script, back=False):
        pass
    assert "in the pause 'eval', and was not restored" in capsys.readouterr().err
    assert not secured(script).whole


def test_a_step_between_two_loops_becomes_the_state_of_that_step(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schedule by epochs steps after the loop over an epoch's steps."""

    def trained(script: Script, until: int) -> Script:
        while script.state.step < until:
            end = script.state.step // 4 * 4 + 4
            script.run(end)
            if end < until:  # the fault occurs in the middle of an epoch
                script.scheduler.step()
        return script

    undisturbed = trained(Script(alone()), 12).bits()
    launch = replace(LAUNCH, snapshot_every=4)
    script = trained(Script(supervised(memory, launch)), 8)
    script.scheduler.step()
    for _ in script.state.steps(9):
        break
    said = capsys.readouterr().err
    assert said.count("scheduler was changed after the commit of step 4, between two loops") == 1
    assert said.count("between two loops") == 1, "the warning must appear once, not after each epoch"
    assert "or in the next loop under `if step == 4:`" in said
    again = Script(resumed(memory, script, launch, 8))
    assert trained(again, 12).bits() == undisturbed


def test_initial_weights_that_are_loaded_over_a_restored_state_are_warned_of(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initial = {k: v.clone() for k, v in Script(alone()).model.state_dict().items()}
    launch = replace(LAUNCH, snapshot_every=4)
    script = Script(supervised(memory, launch)).run(8)
    assert capsys.readouterr().err == ""
    again = Script(resumed(memory, script, launch, 8))
    again.model.load_state_dict(initial)
    again.run(9)
    assert (
        "was written after protect() had restored it: load initial weights before" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("how", "told"), [("always", True), ("asked", False), ("same", False)])
def test_initial_weights_that_a_restart_would_load_again_are_warned_of_in_advance(
    memory: Path, capsys: pytest.CaptureFixture[str], how: str, told: bool
) -> None:
    script = Script(supervised(memory, LAUNCH))
    initial = {k: v.clone() + (how != "same") for k, v in script.model.state_dict().items()}
    if how != "asked" or script.state.step == 0:
        script.model.load_state_dict(initial)
    script.run(3)
    said = (
        "was written between protect() and the first step: after a restart this would overwrite the restored"
    )
    assert (said in capsys.readouterr().err) == told


def test_a_schedule_that_steps_after_the_commit_is_warned_of(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, LAUNCH))
    for _ in script.state.steps(3):
        script.state.commit(loss=script.step())
        script.scheduler.step()
    told: list[Any] = capsys.readouterr().err.splitlines()
    assert "scheduler was changed after the commit of step 1 and before the next step" in told[0]
    assert "make it at the start of the next step, before optimizer.step()" in told[0]
    assert len(told) == 1


def test_changes_before_a_pause_are_not_attributed_to_the_pause(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, LAUNCH))
    for _ in script.state.steps(3):
        script.state.commit(loss=script.step())
        script.scheduler.step()
        with script.state.pause("eval"):
            pass
    told = capsys.readouterr().err
    assert "in the pause" not in told
    assert told.count("before the next step") == 1
