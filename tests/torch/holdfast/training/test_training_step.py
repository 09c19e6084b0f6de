"""The order of events within a step. The crash consistency of the state depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.protocol.progress_writer import Page
from holdfast.state.gradients import GradientProbe
from holdfast.training.number_check import NumberCheck
from holdfast.training.protection.committed_state import CommittedState
from holdfast.training.protection.last_copies import LastCopies
from holdfast.training.protection.late_changes import LateChanges
from holdfast.training.protection.private_backup import PrivateBackup
from holdfast.training.protection.snapshot_schedule import SnapshotSchedule
from holdfast.training.protection.write_gate import WriteGate
from tests.torch.holdfast.training.test_protection import SELDOM
from tests.torch.holdfast.training.test_state import Script, supervised

torch.set_num_threads(1)

BEFORE_WRITE = ["private state has two homes", "gradients are read"]
WRITES = ["writes begin", "page: writing", "optimizer writes"]
COMMIT = ["numbers are checked", "private state is checked", "page: committed", "footprint", "writes end"]
AFTER = ["snapshot if due", "page: tail"]
TAIL = ["page: tail is over", "tail's changes are found"]
MOMENTS: list[tuple[type, str, str]] = [
    (PrivateBackup, "before_optimizer", BEFORE_WRITE[0]),
    (GradientProbe, "finite", BEFORE_WRITE[1]),
    (LastCopies, "before_write", "the state is copied"),
    (WriteGate, "begin_writes", WRITES[0]),
    (Page, "writing", WRITES[1]),
    (NumberCheck, "receive", COMMIT[0]),
    (PrivateBackup, "check", COMMIT[1]),
    (Page, "commit", COMMIT[2]),
    (Page, "skip", "page: skipped"),
    (CommittedState, "record", COMMIT[3]),
    (WriteGate, "end_writes", COMMIT[4]),
    (SnapshotSchedule, "after_commit", AFTER[0]),
    (Page, "tail_begins", AFTER[1]),
    (Page, "tail_is_over", TAIL[0]),
    (LateChanges, "after_tail", TAIL[1]),
]


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list. From now on, the real objects add the events to it."""
    found: list[str] = []

    def noting(inner: Callable[..., Any], word: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(word)
            return inner(*args, **kwargs)

        return noted

    for kind, name, word in MOMENTS:
        monkeypatch.setattr(kind, name, noting(getattr(kind, name), word))
    return found


def test_the_events_of_a_step_occur_in_order(memory: Path, happened: list[str]) -> None:
    script = Script(supervised(memory, SELDOM))
    script.optimizer.register_step_post_hook(lambda *_: happened.append(WRITES[2]))
    steps = script.state.steps(3)
    next(steps)
    happened.clear()
    script.state.commit(loss=script.step())
    next(steps)
    assert happened == [*BEFORE_WRITE, *WRITES, *COMMIT, *AFTER, *TAIL]


def test_with_bad_gradients_the_state_is_copied_before_it_is_written(
    memory: Path, happened: list[str]
) -> None:
    script = Script(supervised(memory, SELDOM))
    next(script.state.steps(3))
    loss: torch.Tensor = script.model(torch.ones(6, 4)).mean() * math.nan
    loss.backward()
    happened.clear()
    script.optimizer.step()
    assert happened == [*BEFORE_WRITE, "the state is copied", *WRITES[:2]]


def test_a_step_without_an_optimizer_passes_through_the_gate_in_the_commit(
    memory: Path, happened: list[str]
) -> None:
    script = Script(supervised(memory, SELDOM))
    steps = script.state.steps(3)
    next(steps)
    happened.clear()
    script.state.commit()
    next(steps)
    assert happened == [COMMIT[0], BEFORE_WRITE[0], WRITES[0], *COMMIT[1:], *AFTER, *TAIL]


def test_a_skipped_step_has_the_same_order_without_the_writes(memory: Path, happened: list[str]) -> None:
    script = Script(supervised(memory, replace(SELDOM, skip=(1,))))
    steps = script.state.steps(3)
    next(steps)
    script.state.commit(loss=script.step())
    happened.clear()
    assert next(steps) == 2
    skipped = [BEFORE_WRITE[0], WRITES[0], "page: skipped", *COMMIT[3:], COMMIT[1], AFTER[0]]
    assert happened == [*TAIL, *skipped, *TAIL]
