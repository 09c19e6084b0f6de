"""On a device, a step's numbers are checked when the next step is committed; no call waits for kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.errors import NumericFault
from holdfast.protocol import progress
from holdfast.protocol.launcher_messages import RankStart
from holdfast.state.device import Broken, HostDevice
from holdfast.state.gradients import GradientProbe, StepNumbers
from holdfast.training.session import Session
from tests.torch.holdfast.simulated_device import Late, Simulated, Stuck
from tests.torch.holdfast.state.devices.test_device_states import (
    LAUNCH,
    Training,
    expected,
    run_until,
    secured,
)
from tests.torch.holdfast.training.test_state import Script, supervised


@pytest.fixture
def device() -> Simulated:
    return Simulated((15,))


class Alone:
    """A script without a supervisor, with given losses and gradients."""

    def __init__(self, device: Simulated) -> None:
        session = Session(replace(LAUNCH, loss_jump=10.0, loss_jump_fault=True), RankStart(0, 0), None)
        session._rank.accelerator = device
        self.device = device
        self.model = nn.Linear(2, 2)
        for parameter in self.model.parameters():
            device.put(parameter)
            parameter.grad = device.put(torch.zeros_like(parameter))
        self.state = session.protect(model=self.model, optimizer=Late(self.model.parameters(), device))

    def run(
        self, losses: list[float], gradient: Callable[[int], float] = lambda _: 0.1, norm: float | None = None
    ) -> Iterator[int]:
        """Commit a step for each loss; yield after each."""
        [optimizer] = self.state._optimizers
        for step in self.state.steps(len(losses)):
            loss = self.device.put(torch.full((), -1.0))
            self.device.launch(lambda loss=loss, step=step: loss.fill_(losses[step]))  # type: ignore[misc]
            for parameter in self.model.parameters():
                grad = parameter.grad
                assert grad is not None
                self.device.launch(lambda grad=grad, step=step: grad.fill_(gradient(step)))  # type: ignore[misc]
            optimizer.step()
            given = None if norm is None else self.device.put(torch.full((), norm))
            self.state.commit(loss=loss, grad_norm=given, position=100 * step)
            yield step


def test_a_commit_waits_for_no_kernel_of_its_own_step_but_for_those_of_the_step_before(
    device: Simulated,
) -> None:
    run = Alone(device).run([3.0, 2.0, 1.0])
    device.choices, device.rests = (0,), True
    next(run)
    assert (device.kernels, device.waits) == (0, 0), "a kernel has run or the host has waited"
    device.drain()
    next(run)
    assert device.waits == 0
    with pytest.raises(Stuck):
        next(run)
    assert device.waits == 1, "the host must be at most one step ahead"


@pytest.mark.parametrize(("bad", "name"), [(math.nan, "not a number"), (-math.inf, "infinite")])
def test_a_bad_loss_is_found_one_step_later_and_attributed_to_its_step(
    device: Simulated, bad: float, name: str
) -> None:
    run = Alone(device).run([3.0, 2.0, bad, 1.0, 1.0])
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(NumericFault, match=rf"step 2: loss {bad} is {name} \(batch position 200\)"):
        next(run)


def test_a_bad_loss_of_the_last_step_is_found_when_the_loop_ends(device: Simulated) -> None:
    with pytest.raises(NumericFault, match=r"step 2: loss nan"):
        list(Alone(device).run([3.0, 2.0, math.nan]))


def test_a_bad_loss_is_found_before_a_pause(device: Simulated) -> None:
    alone = Alone(device)
    run = alone.run([3.0, math.nan, 1.0])
    next(run), next(run)
    with pytest.raises(NumericFault, match=r"step 1: loss nan"), alone.state.pause("eval"):
        pytest.fail("saved or evaluated what is spoilt")


def test_a_loss_jump_is_judged_by_the_losses_before_it(device: Simulated) -> None:
    losses = [1.0 + step / 100 for step in range(30)] + [1e6, 1.0]
    with pytest.raises(NumericFault, match=r"step 30: loss 1e\+06 is far above"):
        list(Alone(device).run(losses))


def test_a_bad_norm_and_a_bad_gradient_at_a_good_loss_are_also_found(device: Simulated) -> None:
    with pytest.raises(NumericFault, match="step 0"):
        list(Alone(device).run([3.0, 2.0], lambda _: math.inf, norm=math.inf))
    with pytest.raises(NumericFault, match="step 1"):
        list(Alone(device).run([3.0, 2.0, 1.0], gradient=lambda step: math.nan if step == 1 else 0.1))


def test_bad_gradients_that_the_optimizer_skipped_are_no_fault(device: Simulated) -> None:
    alone = Alone(device)
    [optimizer] = alone.state._optimizers
    parameters = list(alone.model.parameters())
    step = optimizer.step
    writes = iter((True, False, True))

    def skips() -> None:  # on a real device, a flag there decides this
        grads = [parameter.grad for parameter in parameters]
        if not next(writes):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        step()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad

    optimizer.step = skips
    done = list(
        alone.run([3.0, 2.0, 1.0], gradient=lambda step: math.nan if step == 1 else 0.1, norm=math.inf)
    )
    assert done == [0, 1, 2]


def test_gradients_that_a_scaler_checks_itself_are_not_probed(device: Simulated) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = device.put(torch.full((3,), math.inf))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    gradients = GradientProbe([optimizer], device)
    probe = gradients.probe()
    assert probe is not None
    assert not probe.isfinite()
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as GradScaler sets it for fused ones
    assert gradients.probe() is None


def test_the_page_shows_the_last_known_loss(memory: Path, device: Simulated) -> None:
    training = Training(memory, device)
    shown = []
    for _ in training.host():
        found = progress.read((memory / "page-0.bin").read_bytes())
        assert found is not None
        shown.append((found.step, found.loss))
    assert math.isnan(dict(shown)[1])
    assert [dict(shown)[step] for step in range(2, 7)] == pytest.approx([3.0, 2.9, 2.8, 2.7, 2.6])


def test_numbers_that_are_already_on_the_host_are_judged_at_once(device: Simulated) -> None:
    numbers = StepNumbers(device, 4, 2.5, torch.ones(()))
    assert (numbers.late, numbers.waited, numbers.loss, numbers.norm) == (False, True, 2.5, 1.0)
    late = StepNumbers(device, 4, device.put(torch.full((1, 1), 2.5)), 1.0)
    assert (late.late, late.waited) == (True, True)
    assert math.isnan(late.loss)
    device.drain()
    late.receive()
    assert (late.loss, late.norm) == (2.5, 1.0)


def test_a_state_after_a_bad_number_that_is_not_judged_yet_is_not_trusted(
    memory: Path, device: Simulated
) -> None:
    training = Training(memory, device)
    flagged: list[tuple[str, int]] = []
    training.state._rank.report = (  # type: ignore[method-assign]
        lambda kind, step, *_: flagged.append((kind, step))
    )
    training.loss_of = lambda step: math.nan if step == 2 else 3.0
    run_until(training, 6 * 3)  # the third step is committed; its loss is checked with the fourth
    device.drain()
    answer = secured(training)
    assert (answer.step, answer.whole) == (3, False)
    assert "the loss of step 2 is nan" in answer.why
    assert flagged == [("nan", 2)]
    assert 3 not in training.held()


def test_one_of_two_snapshots_precedes_any_number_that_is_not_judged_yet(
    memory: Path, device: Simulated
) -> None:
    """A rollback to before the newest bad number then finds a state."""
    training = Training(memory, device, every=1)
    for _ in training.host():
        held = training.held()
        unjudged = training.state._numbers._unjudged
        if len(held) == 2 and unjudged is not None:
            assert min(held) <= unjudged.step
            assert held[min(held)] == expected()[min(held)]


def test_slots_are_pinned_once_and_never_after_peers_have_failed(memory: Path, device: Simulated) -> None:
    training = Training(memory, device, every=1)
    run_until(training, 60)
    assert len(device.pinned) == 2, "each slot, except the one that grew with the optimizer's state"
    (memory / "other").mkdir()
    other = Training(memory / "other", late := Simulated((15,)))
    run_until(other, 12)
    before = list(late.pinned)
    assert secured(other).whole
    assert late.pinned == before


def test_a_failed_device_has_no_state_and_causes_no_hang(memory: Path, device: Simulated) -> None:
    training = Training(memory, device)
    run_until(training, 13)
    device.broken = True
    answer = secured(training)
    assert not answer.whole
    assert "illegal memory access" in answer.why
    kept = training.state._protection
    assert kept is not None
    kept.last_copies.before_exit()  # at the exit with the script's own error, which it must not hide
    with pytest.raises(Broken):
        device.mark()


def test_on_the_host_no_number_is_deferred(memory: Path) -> None:
    script = Script(supervised(memory, LAUNCH))
    assert isinstance(script.state._device, HostDevice)
    assert script.run(3).state._numbers._unjudged is None
