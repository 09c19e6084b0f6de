from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.errors import BadInput
from holdfast.state import capture
from holdfast.state.cached_capture import CachedCollector


def group() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    objects = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 1)}
    train(objects)
    return objects


def train(objects: dict[str, Any]) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.randn(2, 3)).sum().backward()
    objects["optimizer"].step()
    objects["scheduler"].step()


def same_as_collected_anew(standing: CachedCollector, objects: dict[str, Any]) -> bool:
    tensors, text = standing.collect()
    tree = capture.collect(objects)
    alike = all(
        name == other_name and tensor is other
        for (name, tensor), (other_name, other) in zip(tensors, tree.tensors, strict=True)
    )
    return alike and json.loads(text) == json.loads(json.dumps(tree.document))


def test_the_collected_result_is_reused_while_only_numbers_and_contents_change() -> None:
    objects = group()
    standing = CachedCollector(objects)
    first, text = standing.collect()
    for _ in range(3):
        train(objects)
        assert same_as_collected_anew(standing, objects)
        assert standing.collect()[0] is first
    assert standing.collect()[1] != text  # the learning rate has decreased


def grow(objects: dict[str, Any]) -> None:
    objects["model"].append(nn.Linear(3, 3))


def grow_within(objects: dict[str, Any]) -> None:
    objects["model"][1].append(nn.Linear(3, 3))


def replace_a_module(objects: dict[str, Any]) -> None:
    objects["model"][1] = nn.Linear(3, 3)


def replace_a_parameter(objects: dict[str, Any]) -> None:
    objects["model"][0].weight = nn.Parameter(torch.randn(3, 3))


def replace_data(objects: dict[str, Any]) -> None:
    objects["model"][0].weight.data = torch.randn(3, 3)


def reshape_data(objects: dict[str, Any]) -> None:
    objects["model"][0].weight.data = objects["model"][0].weight.data.view(9)


def turn_data(objects: dict[str, Any]) -> None:
    objects["model"][0].weight.data = objects["model"][0].weight.data.t()


def retype_data(objects: dict[str, Any]) -> None:
    moment = objects["optimizer"].state[objects["model"][0].bias]["exp_avg"]
    moment.data = moment.data.view(torch.int32)


def rename(objects: dict[str, Any]) -> None:
    table = objects["model"][0]._parameters
    table["other"] = table.pop("bias")
    table["weight"] = table.pop("weight")


def freeze(objects: dict[str, Any]) -> None:
    objects["optimizer"].param_groups[0]["params"].pop()


def add_a_group(objects: dict[str, Any]) -> None:
    objects["optimizer"].add_param_group({"params": [torch.randn(2)]})


def reset_a_state(objects: dict[str, Any]) -> None:
    objects["optimizer"].state.pop(objects["model"][0].bias)


def replace_a_moment(objects: dict[str, Any]) -> None:
    objects["optimizer"].state[objects["model"][0].bias]["exp_avg"] = torch.zeros(3)


def count_in_a_state(objects: dict[str, Any]) -> None:
    objects["optimizer"].state[objects["model"][0].bias]["seen"] = 12_345


def make_the_rate_a_tensor(objects: dict[str, Any]) -> None:
    objects["optimizer"].param_groups[0]["lr"] = torch.tensor(0.1)


CHANGES = [
    grow,
    grow_within,
    replace_a_module,
    replace_a_parameter,
    replace_data,
    reshape_data,
    turn_data,
    retype_data,
    rename,
    freeze,
    add_a_group,
    reset_a_state,
    replace_a_moment,
    count_in_a_state,
    make_the_rate_a_tensor,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_change_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    objects = group()
    standing = CachedCollector(objects)
    standing.collect()
    before, text = standing.collect()
    change(objects)
    after, changed = standing.collect()
    assert after is not before or text != changed
    assert same_as_collected_anew(standing, objects)
    assert same_as_collected_anew(standing, objects)


def test_a_loaded_state_is_noticed() -> None:
    objects = group()
    standing = CachedCollector(objects)
    standing.collect()
    objects["optimizer"].load_state_dict(objects["optimizer"].state_dict())
    assert same_as_collected_anew(standing, objects)


def test_a_list_in_an_optimizers_state_is_checked_every_time() -> None:
    objects = group()
    history: list[Any] = [1]
    objects["optimizer"].state[objects["model"][0].bias]["history"] = history
    standing = CachedCollector(objects)
    standing.collect()
    history.append(torch.ones(2))
    assert same_as_collected_anew(standing, objects)


def test_tensors_of_other_objects_are_collected_every_time() -> None:
    class Average:
        def __init__(self) -> None:
            self.mean = torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean}

    objects = {**group(), "average": Average()}
    standing = CachedCollector(objects)
    standing.collect()
    objects["average"].mean = torch.ones(2)
    assert same_as_collected_anew(standing, objects)


def test_a_value_that_no_snapshot_can_hold_is_named_whenever_it_appears() -> None:
    objects = group()
    standing = CachedCollector(objects)
    standing.collect()
    objects["optimizer"].param_groups[0]["odd"] = 1j
    with pytest.raises(BadInput, match=r"^optimizer\.group\.0\.odd: a complex cannot be stored"):
        standing.collect()


def test_additional_state_is_placed_the_same_in_cached_and_new_results() -> None:
    objects, more = group(), dict[str, Any]()
    standing = CachedCollector(objects, lambda: more)
    plain = standing.collect()[1]
    assert plain == CachedCollector(objects).collect()[1]
    more["holdfast.flags"] = {"model": {"training": {"1": False}}}
    assert standing.collect()[1] == CachedCollector(objects, lambda: more).collect()[1] != plain
