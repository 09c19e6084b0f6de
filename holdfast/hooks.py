"""Where holdfast touches torch's objects: replicated or private, and when a step's parts begin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import BadInput

if TYPE_CHECKING:
    import torch


class Phases(Protocol):
    """Who wants to know."""

    def forward(self) -> None: ...
    def backward(self) -> None: ...
    def before_write(self) -> None: ...


def sort(
    objects: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return modules, objects private to a rank, and replicated objects (modules among them), by name.

    Private is what keeps no tensors and is no scheduler or scaler: a sampler, a data loader, a counter. An
    attribute `holdfast_private` (bool) on the object decides otherwise.

    Raises:
        BadInput: an object has no state_dict and load_state_dict.
    """
    import torch

    modules: dict[str, Any] = {}
    private: dict[str, Any] = {}
    replicated: dict[str, Any] = {}
    for name, value in objects.items():
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise BadInput(
                f"protect({name}=...): a {type(value).__name__} has no state_dict and load_state_dict: "
                "give a module, an optimizer, a scheduler, or an object that has both"
            )
        if isinstance(value, torch.nn.Module):
            modules[name] = replicated[name] = value
        elif _is_private(value):
            private[name] = value
        else:
            replicated[name] = value
    return modules, private, replicated


def _is_private(value: Any) -> bool:
    import torch

    said = getattr(value, "holdfast_private", None)
    if said is not None:
        return bool(said)
    shared = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return not isinstance(value, shared) and not _has_tensor(value.state_dict())


def _has_tensor(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensor(each) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_has_tensor(each) for each in value)


def is_optimizer(value: Any) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)


def attach(modules: Mapping[str, Any], optimizers: Iterable[Any], to: Phases) -> None:
    """Report forward, backward and the optimizer's first write of each step to `to`.

    What follows a forward pass that can be differentiated counts as backward: the loss is a small part of
    it, and a hook on the output for the exact moment costs more than all others together.
    """
    import torch

    def after(_module: Any, _given: Any, output: Any) -> None:
        if torch.is_grad_enabled() and _is_differentiable(output, torch.Tensor):
            to.backward()

    for module in modules.values():
        module.register_forward_pre_hook(lambda *_: to.forward())
        module.register_forward_hook(after)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: to.before_write())


def _is_differentiable(value: Any, tensor: type[torch.Tensor]) -> bool:
    if isinstance(value, tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, (list, tuple)) and any(_is_differentiable(each, tensor) for each in value)


def poison(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Spoil one parameter, as a silent corruption would, and return the loss that it gives."""
    import torch

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.view(-1)[:1].fill_(math.nan)
                return math.nan
    return math.nan
