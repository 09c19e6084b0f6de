from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput
from holdfast.state.module_flags import FLAGS_KEY, ModuleFlags
from tests.torch.holdfast.training.test_state import LAUNCH, Script, resumed, supervised


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def begun(model: nn.Module, document: dict[str, Any] | None = None) -> tuple[ModuleFlags, list[str]]:
    flags = ModuleFlags({"model": model})
    flags.restore(document or {})
    return flags, flags.begin()


def shown(model: nn.Module) -> list[bool]:
    return [*(p.requires_grad for p in model.parameters()), *(m.training for m in model.modules())]


def freeze(model: nn.Module) -> None:
    model[0].requires_grad_(False)  # type: ignore[index]


def still(model: nn.Module) -> None:
    model[1].eval()  # type: ignore[index]


def still_within(model: nn.Module) -> None:
    model[2].eval()  # type: ignore[index]


def both(model: nn.Module) -> None:
    freeze(model)
    still(model)


@pytest.mark.parametrize("once", [freeze, still, still_within, both])
def test_flags_that_are_switched_in_a_step_are_restored_and_stay_recorded(
    once: Callable[[nn.Module], None],
) -> None:
    one, two, three = net(), net(), net()
    flags, _ = begun(one)
    flags.commit()
    assert flags.document() == {}, "no change yet"
    once(one)
    assert flags.document() == {}, "not committed yet"
    flags.commit()
    assert shown(two) != shown(one)
    again, left = begun(two, dict(flags.document()))
    assert (shown(two), left) == (shown(one), [])
    again.commit()
    begun(three, dict(again.document()))
    assert shown(three) == shown(one), "the flags must also be right after the second restart"


def test_flags_that_are_switched_back_are_restored_even_if_the_script_begins_differently() -> None:
    one, two = net(), net()
    flags, _ = begun(one)
    both(one)
    flags.commit()
    one.train()
    one.requires_grad_(True)
    flags.commit()
    still(two)
    begun(two, dict(flags.document()))
    assert shown(two) == shown(one)


def test_an_evaluation_around_a_commit_does_not_change_the_flags_of_submodules() -> None:
    model = net()
    flags, _ = begun(model)
    still(model)
    flags.commit()
    known = flags.document()
    model.eval()
    flags.commit()
    assert flags.document() == known
    model.train()
    flags.commit()
    assert flags.document() == {FLAGS_KEY: {"model": {"training": {"1": True}}}}, "the script reverted it"


def test_a_model_that_begins_in_eval_mode_and_is_set_to_train_in_each_step_is_no_change() -> None:
    model = net().eval()
    flags, _ = begun(model)
    model.train()
    flags.commit()
    assert flags.document() == {}


def test_the_mode_of_a_whole_model_is_left_as_the_script_has_set_it() -> None:
    one, two = net(), net().eval()
    flags, _ = begun(one)
    still(one)
    flags.commit()
    again, _ = begun(two, dict(flags.document()))
    assert not any(each.training for each in two.modules())
    assert again.document() == flags.document()
    two.train()
    again.commit()
    assert again.document() == {FLAGS_KEY: {"model": {"training": {"1": True}}}}


def test_thawed_parameters_are_named_and_left_frozen() -> None:
    one, two = net(), net()
    freeze(one)
    flags, _ = begun(one)
    one.requires_grad_(True)
    flags.commit()
    freeze(two)
    again, left = begun(two, dict(flags.document()))
    assert left == ["model.0.weight", "model.0.bias"]
    assert not two[0].weight.requires_grad
    assert again.begin() == [], "once"


@pytest.mark.parametrize(
    "found", [5, {"model": 5}, {"model": {"training": 5}}, {"model": {"training": {"1": 0}}}]
)
def test_flags_that_no_rank_wrote_are_bad_input(found: object) -> None:
    with pytest.raises(BadInput, match=r"holdfast\.flags"):
        ModuleFlags({"model": net()}).restore({FLAGS_KEY: found})


class Switching(Script):
    """A script that freezes its first layer and its batch norm in step 3."""

    def step(self) -> torch.Tensor:
        if self.state.step == 3:
            self.model[0].requires_grad_(False)
            self.model[1].eval()
        return super().step()


@pytest.mark.parametrize("late", [False, True], ids=["interval", "just in time"])
def test_a_run_that_is_resumed_after_freezing_layers_ends_like_an_undisturbed_run(
    memory: Path, late: bool
) -> None:
    launch = replace(LAUNCH, snapshot_every=0 if late else 5)
    script = Switching(supervised(memory, launch)).run(5)
    if late:
        assert script.state._protection is not None
        assert script.state._protection.snapshot_just_in_time(launch.generation).whole
    session = resumed(memory, script, launch, 5)
    again = Switching(session)
    again.model.train()  # as scripts do before a loop
    whole = Switching(supervised(memory, replace(LAUNCH, generation=9))).run(9)
    assert again.run(9).bits() == whole.bits()


def test_flags_are_not_restored_before_the_earlier_loops_of_a_script_are_skipped(memory: Path) -> None:
    """The script repeats its work between its loops."""
    launch = replace(LAUNCH, snapshot_every=5)
    script = Switching(supervised(memory, launch)).run(5)
    again = Switching(resumed(memory, script, launch, 5)).run(4)
    assert again.model[1].training
    again.run(5)
    assert not again.model[1].training
