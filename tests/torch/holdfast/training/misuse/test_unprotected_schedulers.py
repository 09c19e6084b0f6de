"""A scheduler that is not protected is warned of when it first moves a rate, and only then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.training.session import Session
from holdfast.training.state import State

torch.set_num_threads(1)

WARNED = "a scheduler sets the learning rate of SGD and is not protected"


class Script:
    def __init__(self, rate: float | torch.Tensor = 0.1) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        self.session = Session(Launch(3, 1, 1, "", 0, 0, 0.0), RankStart(0, 0), None)

    def protect(self, **more: Any) -> State:
        return self.session.protect(model=self.model, optimizer=self.optimizer, **more)

    def train(self, state: State, move: Callable[[], object], steps: int = 6) -> None:
        for _ in state.steps(steps):
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
            move()
            state.commit()


def test_a_scheduler_that_is_not_protected_is_warned_of_once_when_it_moves_a_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script()
    scheduler = lr_scheduler.StepLR(script.optimizer, 4, gamma=0.5)
    state = script.protect()
    script.train(state, scheduler.step, 3)
    assert capsys.readouterr().err == "", "it has not moved a rate yet"
    script.train(state, scheduler.step, 20)
    [line] = capsys.readouterr().err.splitlines()
    assert WARNED in line
    assert "state = session.protect(..., scheduler=scheduler)" in line


def test_a_change_of_a_rate_that_is_a_tensor_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(torch.tensor(0.1))
    scheduler = lr_scheduler.CosineAnnealingLR(script.optimizer, 20)
    script.train(script.protect(), scheduler.step)
    assert capsys.readouterr().err.count(WARNED) == 1


class Accelerated:
    """Wraps a scheduler and its optimizers as a library does."""

    def __init__(self, scheduler: Any, *optimizers: Any) -> None:
        self.scheduler, self.optimizers = scheduler, list(optimizers)

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)

    def step(self) -> None:
        self.scheduler.step()


class Called(Accelerated):
    """Knows its optimizer through functions only."""

    def __init__(self, optimizer: Any) -> None:
        made = lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(SimpleNamespace(step=lambda: made.step()))
        self.save = partial(made.state_dict)

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        assert state == {}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=2),
    "wrapped": lambda o: Accelerated(lr_scheduler.ExponentialLR(o, 0.9), o),
    "through functions": Called,
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_protected_scheduler_causes_no_warning(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    script = Script()
    scheduler = SCHEDULERS[kind](script.optimizer)
    script.train(script.protect(scheduler=scheduler), scheduler.step)
    assert capsys.readouterr().err == ""


def test_rates_that_the_script_sets_itself_cause_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    state = script.protect()

    def move() -> None:
        script.optimizer.param_groups[0]["lr"] = 0.1 / (state.step + 1)

    script.train(state, move)
    assert capsys.readouterr().err == ""


def test_only_the_optimizer_without_a_protected_scheduler_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script()
    other_model = nn.Linear(2, 2)
    other = torch.optim.AdamW(other_model.parameters())
    moved, forgotten = lr_scheduler.StepLR(script.optimizer, 1), lr_scheduler.StepLR(other, 1)
    state = script.protect(scheduler=moved, other_model=other_model, other=other)
    for _ in state.steps(4):
        (script.model(torch.ones(1, 2)) + other_model(torch.ones(1, 2))).sum().backward()
        for each in (script.optimizer, other, moved, forgotten):
            each.step()
        state.commit()
    [line] = capsys.readouterr().err.splitlines()
    assert "the learning rate of AdamW" in line
