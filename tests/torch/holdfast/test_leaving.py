"""What a script ends with is kept if it is what its loop ended with, and nothing else is taken for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.progress import Phase
from tests.torch.holdfast.test_keeping import SELDOM, page_of, steps_of
from tests.torch.holdfast.test_state import Script, resumed, supervised


def left(script: Script) -> bool:
    """Return what is said of the last state when the script ends."""
    script.state.session._leaving()
    assert script.state.keeping is not None
    return script.state.keeping.leaving()


def test_the_state_of_a_loop_that_was_done_is_kept_when_the_script_ends(memory: Path) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    assert 9 not in steps_of(script)
    script.model.eval()
    script.model(torch.randn(6, 4))  # a last evaluation
    assert left(script)
    assert 9 in steps_of(script)
    assert page_of(memory).phase is Phase.DONE
    assert Script(resumed(memory, script, SELDOM, 9)).bits() == script.bits()


def test_a_generation_that_had_nothing_to_do_keeps_what_it_began_with(memory: Path) -> None:
    every = replace(SELDOM, snapshot_every=1)
    first = Script(supervised(memory, every)).run(5)
    assert left(Script(resumed(memory, first, SELDOM, 5)).run(5))


def weights_loaded(script: Script) -> None:
    script.model.load_state_dict({k: v * 2 for k, v in script.model.state_dict().items()})


def scheduler_stepped(script: Script) -> None:
    script.scheduler.step()


def position_changed(script: Script) -> None:
    script.data.at += 1


def loop_left(script: Script) -> None:
    for _ in script.state.steps(20):
        script.state.commit(loss=script.step())
        break


def loop_left_at_once(script: Script) -> None:
    for _ in script.state.steps(20):
        break


@pytest.mark.parametrize(
    "what", [weights_loaded, scheduler_stepped, position_changed, loop_left, loop_left_at_once]
)
def test_what_is_no_state_to_train_on_from_is_not_kept(memory: Path, what: Callable[[Script], None]) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    what(script)
    assert not left(script)
    assert page_of(memory).phase is Phase.IDLE


def test_without_snapshots_there_is_no_last_one(memory: Path) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=0))).run(9)
    assert not left(script)
    assert steps_of(script) == {0}
