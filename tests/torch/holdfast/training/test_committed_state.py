from __future__ import annotations

import pytest
import torch

from holdfast.state.device import HostDevice
from holdfast.training.protection.committed_state import SEARCH_EVERY, CommittedState


class OwnParameters(torch.nn.Linear):
    """A module that decides itself what its parameters are."""

    def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return super().named_parameters(*args, **kwargs)


def finds_new_parameter(model: torch.nn.Module, before: object, now: object) -> bool:
    """Return whether a footprint lists a parameter that was added between two snapshots of these lists."""
    committed = CommittedState({"model": model}, HostDevice(), print)
    committed.record(1)
    committed.collected(before)
    committed.record(2)
    model.register_parameter("added", torch.nn.Parameter(torch.zeros(1)))
    committed.collected(now)
    committed.record(3)
    assert committed.footprint is not None
    return "model.added" in committed.footprint.walk.names


def test_parameters_are_searched_if_a_snapshot_has_collected_another_list() -> None:
    assert finds_new_parameter(torch.nn.Linear(2, 2), [], [])


def test_parameters_are_not_searched_if_a_snapshot_has_collected_the_same_list() -> None:
    same: list[object] = []
    assert not finds_new_parameter(torch.nn.Linear(2, 2), same, same)


def test_parameters_are_always_searched_if_a_module_lists_them_itself() -> None:
    same: list[object] = []
    assert finds_new_parameter(OwnParameters(2, 2), same, same)


def trained(layers: int = 60) -> tuple[list[torch.nn.Linear], torch.optim.Adam, CommittedState]:
    """Return the layers of a model with more parameters than are sampled, and its state after two commits."""
    parts = [torch.nn.Linear(2, 2) for _ in range(layers)]
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    committed = CommittedState({"model": model, "optimizer": optimizer}, HostDevice(), print)
    committed.record(1)
    committed.record(2)
    return parts, optimizer, committed


@pytest.mark.parametrize("layer", range(60))
def test_a_parameter_that_a_step_has_moved_is_not_taken_for_a_later_change(layer: int) -> None:
    parts, _, committed = trained()
    weight = parts[layer].weight
    weight.data = weight.data.clone()
    committed.record(3)
    assert committed.changed() is None
    weight.data = weight.data.clone()
    assert "was replaced after the commit of step 3" in str(committed.changed())


@pytest.mark.parametrize("layer", range(60))
def test_an_optimizer_state_that_a_step_has_replaced_prevents_copies_only_until_the_next_commit(
    layer: int,
) -> None:
    parts, optimizer, committed = trained()
    state = optimizer.state[parts[layer].weight]
    state["exp_avg"] = state["exp_avg"].clone()
    committed.record(3)
    committed.changed()  # a copy, which may be refused
    committed.record(4)
    assert committed.changed() is None


def test_replaced_tensors_are_found_without_a_copy_too() -> None:
    parts, optimizer, committed = trained()
    for layer in parts:
        state = optimizer.state[layer.weight]
        state["exp_avg"] = state["exp_avg"].clone()
    for step in range(3, 3 + SEARCH_EVERY):
        committed.record(step)
    assert committed.changed() is None
