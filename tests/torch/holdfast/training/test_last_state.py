"""The state at a script's end is kept only if it is the state at the end of its loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.protocol.progress import Phase
from holdfast.snapshot.arena import Arena, SlotWriter
from holdfast.training.protection import last_copies
from tests.torch.holdfast.training.test_protection import SELDOM, page_of, steps_of
from tests.torch.holdfast.training.test_state import Script, resumed, supervised


def left(script: Script) -> bool:
    """Return True if the last state is kept when the script ends."""
    channel = script.state._rank.channel
    assert channel is not None
    assert channel.on_leaving is not None
    channel.on_leaving()
    assert script.state._protection is not None
    return not script.state._protection.keep_final_state()


def test_the_state_of_a_completed_loop_is_kept_when_the_script_ends(memory: Path) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    assert 9 not in steps_of(script)
    script.model.eval()
    script.model(torch.randn(6, 4))  # a last evaluation
    assert left(script)
    assert 9 in steps_of(script)
    assert page_of(memory).phase is Phase.DONE
    assert Script(resumed(memory, script, SELDOM, 9)).bits() == script.bits()


def test_a_generation_without_steps_to_do_keeps_its_initial_state(memory: Path) -> None:
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
def test_a_state_that_changed_after_its_loop_or_left_it_early_is_not_kept(
    memory: Path, what: Callable[[Script], None]
) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    what(script)
    assert not left(script)
    assert page_of(memory).phase is Phase.IDLE


def test_without_snapshots_no_last_state_is_kept(memory: Path) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=0))).run(9)
    assert not left(script)
    assert steps_of(script) == {0}


def after_each_copy(script: Script, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call `then` after each attempt of this rank to copy."""
    assert script.state._protection is not None
    kept = script.state._protection.snapshots
    copy = kept.copy

    def copied(step: int, *, over_newer: bool = False) -> str:
        failed = copy(step, over_newer=over_newer)
        then()
        return failed

    monkeypatch.setattr(kept, "copy", copied)


def begun_by_another(memory: Path, script: Script) -> SlotWriter:
    """Begin a copy of the last state as another rank of the member does, and return it."""
    assert script.state._protection is not None
    assert script.state._protection.snapshots.writer._layout is not None
    draft = Arena(memory / "arena").begin(script.state._protection.snapshots.writer._layout[2], 3, 9, 1)
    assert draft is not None
    return draft


@pytest.mark.parametrize("done", [True, False])
def test_the_first_rank_of_a_member_waits_for_another_ranks_copy_of_the_last_state_and_replaces_a_failed_one(
    memory: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    other = begun_by_another(memory, script)
    after_each_copy(script, monkeypatch, other.commit if done else other.abandon)
    assert left(script)
    assert 9 in steps_of(script)
    assert (page_of(memory).snapshot_step == 9) == (not done)


def test_the_wait_for_a_copy_that_never_ends_is_bounded(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    monkeypatch.setattr(last_copies, "copy_limit_s", lambda _: 0.0)
    with begun_by_another(memory, script):
        assert not left(script)
        assert script.state._protection is not None
        assert script.state._protection.keep_final_state() == "all snapshot slots were in use"


@pytest.mark.parametrize(("limit_s", "held"), [(math.inf, {4, 9}), (0.0, {0, 9})])
def test_a_slot_that_is_being_read_is_waited_for_and_after_the_limit_the_newer_one_is_overwritten(
    memory: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, held: set[int]
) -> None:
    script = Script(supervised(memory, SELDOM)).run(9)
    arena = Arena(memory / "arena")
    monkeypatch.setattr(last_copies, "copy_limit_s", lambda _: limit_s)
    with ExitStack() as reading:
        reading.enter_context(arena.pin(arena.records()[-1]))
        if limit_s:
            after_each_copy(script, monkeypatch, reading.close)
        assert left(script)
    assert steps_of(script) == held
