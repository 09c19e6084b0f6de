from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from holdfast.state.gradients import GradientProbe


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


@pytest.fixture
def gradients(model: nn.Module) -> GradientProbe:
    return GradientProbe([torch.optim.SGD(model.parameters(), lr=0.1)])


def backward(model: nn.Module, factor: float) -> None:
    model.zero_grad()
    (model(torch.arange(4)).pow(2).mean() * factor).backward()


def test_gradients_are_good_before_the_first_backward_pass(gradients: GradientProbe) -> None:
    assert gradients.finite()


def test_finite_gradients_are_good(model: nn.Module, gradients: GradientProbe) -> None:
    backward(model, 1.0)
    assert gradients.finite()


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_shows_in_the_gradients_whichever_tensors_are_probed(
    model: nn.Module, gradients: GradientProbe, factor: float
) -> None:
    backward(model, 1.0)
    assert gradients.finite()
    backward(model, factor)
    assert not gradients.finite()
    backward(model, 1.0)
    assert gradients.finite()


def test_one_bad_sample_of_a_batch_is_detected(model: nn.Module, gradients: GradientProbe) -> None:
    model.zero_grad()
    output = model(torch.arange(4))
    output.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), math.nan))
    output.pow(2).mean().backward()
    assert not gradients.finite()


def test_large_half_precision_gradients_do_not_overflow_in_the_sum() -> None:
    parameter = nn.Parameter(torch.ones(1000, dtype=torch.float16))
    gradients = GradientProbe([torch.optim.SGD([parameter], lr=0.1)])
    parameter.grad = torch.full((1000,), 6e4, dtype=torch.float16)
    assert gradients.finite()
    parameter.grad[7] = math.inf
    assert not gradients.finite()


def test_a_frozen_parameter_is_not_probed(model: nn.Module, gradients: GradientProbe) -> None:
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)
    backward(model, 1.0)
    assert gradients.finite()
    backward(model, math.nan)
    assert not gradients.finite()


def test_an_optimizer_that_skips_bad_steps_itself_is_not_probed(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    gradients = GradientProbe([optimizer])
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients.finite()))
    scaler.scale(model(torch.arange(4)).pow(2).mean() * math.inf).backward()
    scaler.step(optimizer)
    assert seen == [True]
