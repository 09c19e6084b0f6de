"""Objects that a script saves, copies or compiles are the same as without `protect`."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.state import torch_hooks
from holdfast.training.state import State
from tests.torch.holdfast.state.test_restore import Sharp
from tests.torch.holdfast.training.misuse.test_misuse import plain

torch.set_num_threads(1)
INPUT = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))


class Whole(torch.optim.SGD):
    """An optimizer that saves all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "step": None}


class Protected:
    """A script's objects in the middle of its training."""

    def __init__(self, *, wrapped: bool, trained: int) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.module.register_forward_hook(shift)
        self.model: nn.Module = DistributedDataParallel(self.module) if wrapped else self.module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu")
        self.state: State = plain(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler
        )
        for step in self.state.steps(trained):
            loss = self.model(INPUT).mean()
            loss.backward()
            if step != 1:  # one after which the state watches gradients
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.state.commit(loss=loss)


def shift(_module: nn.Module, _given: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """The script's own hook."""
    return output + 1


@pytest.fixture(
    params=[(False, 0), (False, 2), (True, 0), (True, 2)],
    ids=["begun", "trained", "begun in DDP", "trained in DDP"],
)
def objects(request: pytest.FixtureRequest) -> Iterator[Protected]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Protected(wrapped=request.param[0], trained=request.param[1])
    dist.destroy_process_group()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(value, file)
    return file.getvalue()


def is_free(data: bytes) -> bool:
    """Return whether `data` refers to nothing of holdfast; this module's name is ignored."""
    return b"holdfast" not in data.replace(__name__.encode(), b"")


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("which", ["module", "model", "optimizer", "scheduler", "scaler"])
def test_saved_objects_can_be_loaded_without_holdfast(objects: Protected, which: str) -> None:
    data = saved(getattr(objects, which))
    assert is_free(data)
    again = loaded(data)
    assert str(again.state_dict()) == str(getattr(objects, which).state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: loaded(saved(model))])
def test_a_copy_of_a_model_has_its_own_hooks_but_none_of_holdfast(
    objects: Protected, copied: Callable[[nn.Module], nn.Module]
) -> None:
    again = copied(objects.module).eval()
    assert [*again._forward_hooks.values()] == [shift]
    assert not again._forward_pre_hooks
    told = objects.state._numbers.is_poisoned
    objects.state._poison()  # a pass of the protected model would now set the flag
    assert torch.equal(again(INPUT), objects.module.eval().forward(INPUT) + 1)
    assert objects.state._numbers.is_poisoned == told
    objects.model(INPUT)
    assert objects.state._numbers.is_poisoned, "the model must still report changes after it was copied"


@pytest.mark.parametrize("which", ["optimizer", "scheduler", "scaler"])
def test_optimizer_scheduler_and_scaler_can_be_copied(objects: Protected, which: str) -> None:
    again = copy.deepcopy(getattr(objects, which))
    assert str(again.state_dict()) == str(getattr(objects, which).state_dict())


def test_an_optimizer_that_saves_all_its_attributes_saves_nothing_of_holdfast() -> None:
    model = nn.Linear(2, 2)
    whole, sharp = Whole(model.parameters(), lr=0.1), Sharp(model.parameters())
    plain(model=model, optimizer=whole, sharp=sharp)
    assert is_free(pickle.dumps(whole))
    copy.deepcopy(sharp)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", [lambda model: model, copy.deepcopy], ids=["it", "a copy"])
def test_a_protected_model_can_be_compiled_to_torchscript(
    objects: Protected, made: Callable[[nn.Module], nn.Module]
) -> None:
    scripted = torch.jit.script(made(objects.module))
    assert torch.equal(scripted.eval()(INPUT), objects.module.eval().forward(INPUT) + 1)


def test_a_handle_from_before_protect_still_removes_its_hook() -> None:
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda *_: torch.zeros(1))
    plain(model=model)
    handle.remove()
    assert model(INPUT).shape == (8, 2)


def test_a_hook_of_holdfast_that_is_copied_alone_does_nothing() -> None:
    """For example in a plain dict, or when a script takes it out of the model's hooks."""
    told: list[Any] = []
    hooks: dict[int, Any] = {0: torch_hooks.Hook(lambda *given: told.append(given))}
    torch_hooks.hide_from_copies(hooks)
    data = pickle.dumps(hooks)
    assert is_free(data)
    for again in (cast("dict[int, Any]", pickle.loads(data)), copy.deepcopy(hooks)):
        does_nothing = again[0]("module", "given", "output") is None
        assert does_nothing
    assert told == []
    hooks[0]("module", "given")
    assert told == [("module", "given")]
