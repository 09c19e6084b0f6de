from __future__ import annotations

import torch

from holdfast.state.device import HostDevice
from holdfast.training.protection.committed_state import CommittedState


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
