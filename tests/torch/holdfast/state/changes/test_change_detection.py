"""Any write of a script to the state between two commits is detected. Reads are not reported."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.state.change_detection import ChangeDetector
from tests.torch.holdfast.state.test_restore import Masters

torch.set_num_threads(1)


def group() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": lr_scheduler.StepLR(optimizer, 1),
        "scaler": scaler,
    }
    train(objects)
    return objects


def passes(objects: dict[str, Any]) -> None:
    loss = objects["model"](torch.ones(4, 6)).sum()
    objects["scaler"].scale(loss).backward()


def train(objects: dict[str, Any]) -> None:
    passes(objects)
    objects["scaler"].step(objects["optimizer"])
    objects["scaler"].update()
    objects["scheduler"].step()
    objects["optimizer"].zero_grad()


def swap_in_place(objects: dict[str, Any]) -> None:
    other = copy.deepcopy(objects["model"])
    with torch.no_grad():
        for parameter, average in zip(objects["model"].parameters(), other.parameters(), strict=True):
            parameter.copy_(average + 1)


def swap_through_data(objects: dict[str, Any]) -> None:
    for parameter in objects["model"].parameters():
        parameter.data.copy_(parameter.data * 1.001 + 0.001)


def swap_data(objects: dict[str, Any]) -> None:
    for parameter in objects["model"].parameters():
        parameter.data = parameter.data.clone()


def swap_one(objects: dict[str, Any]) -> None:
    objects["model"][1].weight.data = objects["model"][1].weight.data.clone()


def load(objects: dict[str, Any]) -> None:
    objects["model"].load_state_dict(objects["model"].state_dict())


def replace(objects: dict[str, Any]) -> None:
    objects["model"][0].weight = nn.Parameter(objects["model"][0].weight.detach())


def grow(objects: dict[str, Any]) -> None:
    objects["model"].append(nn.Linear(3, 3))


def merge_into_a_frozen_one(objects: dict[str, Any]) -> None:
    objects["model"][2].bias.data += 0.5


def look_around(objects: dict[str, Any]) -> None:
    """Do SAM's first step."""
    with torch.no_grad():
        torch._foreach_add_([p for p in objects["model"].parameters() if p.requires_grad], 1e-4)


def schedule(objects: dict[str, Any]) -> None:
    objects["scheduler"].step()


def scale(objects: dict[str, Any]) -> None:
    """Do what a scaler does in a step that it skips."""
    for parameter in objects["model"].parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    objects["scaler"].step(objects["optimizer"])
    objects["scaler"].update()


CHANGES = [
    swap_in_place,
    swap_through_data,
    swap_data,
    swap_one,
    load,
    replace,
    grow,
    merge_into_a_frozen_one,
    look_around,
    schedule,
    scale,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_write_after_a_commit_is_detected(change: Callable[[dict[str, Any]], None]) -> None:
    objects = group()
    footprints = ChangeDetector(objects)
    taken = footprints.footprint(1)
    passes(objects)
    assert footprints.first_change(taken) is None
    assert footprints.sampled_change(taken) is None
    change(objects)
    said = footprints.first_change(taken)
    assert (footprints.sampled_change(taken) is None) == (change in (replace, grow))
    assert said is not None
    assert said.endswith(("was written", "were written", "was replaced", "was added", "was changed"))
    again = footprints.footprint(2, walk=True)
    assert footprints.first_change(again) is None
    assert footprints.first_change(taken) == said


@pytest.mark.parametrize("restored", [False, True])
def test_tensors_that_a_scaler_creates_at_its_first_use_are_no_change_but_writes_to_them_are(
    restored: bool,
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.1)
    if restored:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 0.3, "_growth_tracker": 3})
    footprints = ChangeDetector({"scaler": scaler})
    taken = footprints.footprint(1)
    scaler.scale(torch.ones(()))
    assert footprints.first_change(taken) is None
    assert footprints.late_change(footprints.footprint(1)) is None
    made = scaler._scale
    scaler._scale = torch.full((), 7.0)
    assert footprints.first_change(taken) == "scaler was changed"
    scaler._scale = made
    assert footprints.first_change(taken) is None
    scaler.update(0.5)
    assert footprints.first_change(taken) == "scaler was changed"


def test_another_first_scale_is_a_change() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.1)
    footprints = ChangeDetector({"scaler": scaler})
    taken = footprints.footprint(1)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 0.3})
    assert footprints.first_change(taken) == "scaler was changed"


def test_a_step_is_detected_and_named() -> None:
    objects = group()
    footprints = ChangeDetector(objects)
    taken = footprints.footprint(1)
    train(objects)
    assert footprints.first_change(taken) == "model.0.weight was written"


def test_training_and_evaluation_before_the_next_write_are_no_change() -> None:
    objects = group()
    footprints = ChangeDetector(objects)
    taken = footprints.footprint(1)
    objects["model"].eval()
    with torch.no_grad():
        objects["model"](torch.ones(2, 6))
    objects["model"].train()
    passes(objects)
    nn.utils.clip_grad_norm_(objects["model"].parameters(), 1.0)
    objects["optimizer"].param_groups[0]["lr"] = 0.5  # a manual schedule, set at the beginning of each step
    objects["optimizer"].zero_grad()
    assert footprints.first_change(taken) is None


@pytest.mark.parametrize("data", [False, True], ids=["values", "data"])
def test_weights_that_are_swapped_back_count_as_the_state_again(data: bool) -> None:
    objects = group()
    footprints = ChangeDetector(objects)
    taken = footprints.footprint(1)
    parameters = list(objects["model"].parameters())
    kept = [p.data if data else p.detach().clone() for p in parameters]
    (swap_data if data else swap_in_place)(objects)
    assert footprints.renew(taken) is None
    with torch.no_grad():
        for parameter, old in zip(parameters, kept, strict=True):
            if data:
                parameter.data = old
            else:
                parameter.copy_(old)
    back = footprints.renew(taken)
    assert back is not None
    assert footprints.first_change(back) is None
    train(objects)
    assert footprints.first_change(back) is not None


def test_masters_that_belong_to_no_module_are_checked() -> None:
    model = nn.Linear(3, 3).bfloat16()
    optimizer = Masters(model.parameters(), lr=0.1)
    footprints = ChangeDetector({"model": model, "optimizer": optimizer})
    taken = footprints.footprint(0)
    optimizer.param_groups[0]["params"][0].add_(1)
    assert footprints.first_change(taken) == "optimizer.param.0 was written"


def test_parameters_that_get_new_memory_in_each_step_are_followed() -> None:
    model = nn.Linear(3, 3)
    footprints = ChangeDetector({"model": model})
    for step in range(3):
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1
        assert footprints.first_change(footprints.footprint(step)) is None


def test_tiny_odd_and_empty_parameters_are_also_checked() -> None:
    model = nn.Module()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("slim", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    model.register_parameter("wide", nn.Parameter(torch.ones(1).expand(4)))
    model.register_parameter("turned", nn.Parameter(torch.randn(3, 5).t()))
    footprints = ChangeDetector({"model": model})
    taken = footprints.footprint(0)
    assert footprints.first_change(taken) is None
    model.get_parameter("slim").data += 1
    assert footprints.first_change(taken) == "parameters were written"


def test_a_parameter_that_was_created_in_inference_mode_also_has_a_footprint() -> None:
    model = nn.Linear(6, 40)
    with torch.inference_mode():
        model.bias = nn.Parameter(torch.zeros(40), requires_grad=False)
    footprints = ChangeDetector({"model": model})
    since = footprints.footprint(1)
    assert footprints.sampled_change(since) is None
    with torch.no_grad():
        model.weight.add_(1)
    assert footprints.first_change(since) == "model.weight was written"
    since = footprints.footprint(2)
    with torch.inference_mode():
        model.bias.add_(1)
    assert footprints.first_change(since) == "parameters were written"


class Average:
    """Like torch_ema's average: it is no module, and its state_dict returns the tensors themselves."""

    def __init__(self, model: nn.Module, tensors: int = 0) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.shadow += [torch.zeros(2) for _ in range(tensors)]
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "n": self.n}

    def load_state_dict(self, _state: dict[str, Any]) -> None: ...


class Detached(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [each.detach() for each in self.shadow]}


class Copied(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [each.clone() for each in self.shadow]}


class Drawn(Average):
    def __iter__(self) -> Any:
        return iter(self.shadow)


def test_an_average_that_is_no_module_is_checked() -> None:
    model = nn.Linear(3, 3)
    for kind, more in ((Average, 0), (Average, 200), (Detached, 0), (Detached, 200)):
        average = kind(model, more)
        footprints = ChangeDetector({"model": model, "ema": average})
        taken = footprints.footprint(1)
        assert footprints.first_write(taken) is footprints.late_change(taken) is None
        assert footprints.first_change(taken) is None
        average.shadow[-1].mul_(0.5)
        said = footprints.first_write(taken) or footprints.late_change(taken) or ""
        assert said.startswith("ema "), (kind, more)
        assert not footprints.unseen
    average = Average(model)
    taken = (footprints := ChangeDetector({"ema": average})).footprint(1)
    average.n += 1
    assert footprints.late_change(taken) == "ema was changed"


def test_objects_that_return_copies_are_named_as_unchecked_and_data_is_not() -> None:
    model = nn.Linear(3, 3)
    footprints = ChangeDetector({"ema": Copied(model), "data": Drawn(model)})
    assert footprints.first_change(footprints.footprint(1)) is None
    assert footprints.unseen == ["ema"]


def reset_in_place(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def reset_by_others(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def reset_at_once(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def reset_through_data(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data.add_(1)


def decay(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[-1]["weight_decay"] = 0.7


def rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[-1]["lr"] /= 2


@pytest.mark.parametrize(
    "change",
    [reset_in_place, reset_by_others, reset_at_once, reset_through_data, decay, rate],
    ids=lambda change: change.__name__,
)
def test_the_state_and_the_groups_of_an_optimizer_are_checked(
    change: Callable[[torch.optim.Optimizer], None],
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.1)
    footprints = ChangeDetector({"model": model, "optimizer": optimizer})
    footprints.footprint(0)
    for step in (1, 2, 3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        taken = footprints.footprint(step)  # not walked: the first step created the state
        assert footprints.first_write(taken) is footprints.late_change(taken) is None
        assert footprints.first_change(taken) is None
    change(optimizer)
    seen = footprints.first_change(taken) if change is reset_through_data else footprints.first_write(taken)
    assert seen or footprints.late_change(taken)


def test_an_optimizer_that_replaces_its_tensors_in_each_step_is_followed_without_keeping_them_alive() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    footprints = ChangeDetector({"model": model, "optimizer": optimizer})
    for step in range(6):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        before = [weakref.ref(state["momentum_buffer"]) for state in optimizer.state.values()]
        taken = footprints.footprint(step)
        assert footprints.first_change(taken) is None
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"] * 1.0
        assert footprints.first_write(taken) is not None
    assert not any(each() for each in before)


def freeze(objects: dict[str, Any]) -> None:
    objects["model"][0].weight.requires_grad_(False)


def rename(objects: dict[str, Any]) -> None:
    model = objects["model"]
    model._modules["last"] = model._modules.pop("2")


def add_group(objects: dict[str, Any]) -> None:
    objects["optimizer"].add_param_group({"params": [objects["model"][2].bias]})


def replace_a_state(objects: dict[str, Any]) -> None:
    state = objects["optimizer"].state[objects["model"][0].weight]
    state["exp_avg"] = state["exp_avg"].clone()


FORMS = [swap_data, swap_one, replace, grow, freeze, rename, add_group, replace_a_state]


@pytest.mark.parametrize("change", FORMS, ids=lambda change: change.__name__)
def test_a_search_lists_the_parameters_again_only_if_it_would_find_others(
    change: Callable[[dict[str, Any]], None],
) -> None:
    objects = group()
    footprints = ChangeDetector(objects)
    first = footprints.footprint(1)
    train(objects)
    again = footprints.footprint(2, walk=True)
    assert again.walk is first.walk
    assert footprints.first_change(again) is None
    change(objects)
    found = footprints.footprint(3, walk=True)
    fresh = ChangeDetector(objects).footprint(3)
    assert found.walk is not first.walk
    assert (found.walk.names, found.walk.places) == (fresh.walk.names, fresh.walk.places)
    assert footprints.first_change(found) is None


class Listing(nn.Linear):
    def named_parameters(self, *args: Any, **named: Any) -> Any:
        return iter(list(super().named_parameters(*args, **named))[:1])


def test_a_module_that_lists_its_parameters_itself_is_asked_each_time() -> None:
    footprints = ChangeDetector({"model": Listing(3, 3)})
    first = footprints.footprint(1)
    assert footprints.footprint(2, walk=True).walk is not first.walk
