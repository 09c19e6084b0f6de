"""What a script that does not join is looked at for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from holdfast.unmodified import Looks
from tests.torch.holdfast.simulation import Simulated, Stuck


def optimizer_with(gradient: float, device: Simulated | None = None) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), gradient)
    if device is not None:
        device.put(parameter.grad)
    return torch.optim.SGD([nn.Parameter(torch.ones(2)), parameter], lr=0.1)


@pytest.mark.parametrize(("gradient", "bad"), [(0.5, None), (math.nan, 7), (-math.inf, 7)])
def test_on_the_host_a_bad_gradient_is_found_before_the_next_step(gradient: float, bad: int | None) -> None:
    looks, optimizer = Looks(), optimizer_with(gradient)
    optimizer.step()
    assert looks.bad(optimizer, 7) is None
    assert looks.settled(optimizer) == bad
    assert looks.settled(optimizer) is None


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_bad_gradient_that_was_not_written_or_was_undone_is_no_fault(gradient: float) -> None:
    looks, optimizer = Looks(), optimizer_with(gradient)
    assert looks.bad(optimizer, 7) is None  # left out
    assert looks.settled(optimizer) is None
    parameter = optimizer.param_groups[0]["params"][1]
    before = parameter.detach().clone()
    optimizer.step()
    assert looks.bad(optimizer, 8) is None
    with torch.no_grad():
        parameter.copy_(before)
    assert looks.settled(optimizer) is None


def test_on_a_device_it_is_found_one_step_later_and_nothing_is_waited_for_before() -> None:
    device = Simulated((0,), rests=True)
    looks = Looks(lambda _: device)
    assert looks.bad(optimizer_with(0.5, device), 6) is None
    assert device.waits == 0
    device.drain()
    assert looks.bad(optimizer_with(math.inf, device), 7) is None
    device.drain()
    spoilt = optimizer_with(0.5, device)
    with torch.no_grad():
        spoilt.param_groups[0]["params"][1].fill_(math.nan)
    assert looks.bad(spoilt, 8) == 7
    assert device.waits == 0
    with pytest.raises(Stuck):  # the host is a step ahead at most
        looks.bad(optimizer_with(0.5, device), 9)


def test_gradients_that_a_scaler_leaves_to_the_optimizer_are_no_fault() -> None:
    optimizer = optimizer_with(math.inf)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as GradScaler sets it for fused ones
    assert Looks().bad(optimizer, 7) is None


def test_without_a_gradient_there_is_nothing_to_find() -> None:
    assert Looks().bad(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 7) is None
