from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.state import torch_hooks
from tests.torch.holdfast.state.test_restore import Sharp


class Told:
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def forward(self) -> None:
        self.words.append("forward")

    def backward(self) -> None:
        self.words.append("backward")

    def before_write(self) -> None:
        self.words.append("write")

    def should_poison(self) -> bool:
        return False

    def poisoned(self) -> None:
        raise AssertionError("no drill has asked for it")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def told_by(model: nn.Module) -> list[str]:
    told = Told()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_hooks.attach_hooks({"model": model}, [optimizer], told)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return told.words


def test_the_parts_of_a_step_are_told() -> None:
    assert told_by(nn.BatchNorm1d(2)) == ["forward", "backward", "write"]


def test_the_optimizer_within_another_tells_as_well() -> None:
    told = Told()
    model = nn.Linear(2, 2)
    optimizer = Sharp(model.parameters())
    torch_hooks.attach_hooks({}, [optimizer], told)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.base_optimizer.step()
    assert told.words == ["write"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("module", [nn.BatchNorm1d(2), nn.Linear(2, 2)], ids=["buffers", "none"])
def test_after_ddp_has_waited_for_buffers_the_module_says_again_that_it_begins(module: nn.Module) -> None:
    waits = next(module.buffers(), None) is not None
    assert told_by(DistributedDataParallel(module)) == ["forward"] * (1 + waits) + ["backward", "write"]


class Kept:
    """It keeps numbers, and has its optimizer."""

    after: torch.optim.lr_scheduler.LRScheduler

    def __init__(self, optimizer: Any, **more: Any) -> None:
        self.optimizer, self.count, self.marks = optimizer, 0, [1, (2, "x")]
        self.shape, self.more = abs, more

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Ramp(Kept):
    """A scheduler of the script's own, in the style of timm."""

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1 / self.count


class Drawing(Ramp):
    def __iter__(self) -> Iterator[int]:
        return iter([])


class Clipping(Kept):
    """It steps the optimizer, and counts what one rank saw."""

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()


class Apart(Ramp):
    def step(self) -> None:
        optimizer = self.optimizer
        optimizer.step()


class Tokens(Kept):
    def step(self) -> None:
        self.count += 1


class Warmed(Ramp):
    """A ramp, and after it a scheduler of torch's."""

    def step(self) -> None:
        super().step()
        self.after.step()

    def begin(self) -> None:
        self.step()


class Counter(Ramp):
    step = None  # type: ignore[assignment]


OWN = {"clipping", "apart", "tokens"}  # they set no option, or step the optimizer


def test_a_scheduler_of_any_class_is_what_all_ranks_share_and_nothing_that_may_be_a_rank_s_own() -> None:
    model = nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    said = Ramp(optimizer)
    said.holdfast_private = True  # type: ignore[attr-defined]
    within = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    warmed = Warmed(optimizer)
    warmed.after = within
    endless: list[Any] = []
    endless.append(endless)
    given = {
        "model": model,
        "optimizer": optimizer,
        "ramp": Ramp(optimizer),
        "several": Ramp([optimizer], torch={"within": within}),
        "engine": Ramp(optimizer, model=model),
        "feeder": Ramp(optimizer, data=iter([1])),
        "stranger": Ramp(other),
        "endless": Ramp(optimizer, more=endless),
        "clipping": Clipping(optimizer),
        "apart": Apart(optimizer),
        "tokens": Tokens(optimizer),
        "warmed": warmed,
        "counter": Counter(optimizer),
        "drawing": Drawing(optimizer),
        "said": said,
    }
    _, private, replicated = torch_hooks.classify(given)
    assert set(replicated) == {"model", "optimizer", "ramp", "several", "warmed"}
    assert not any(torch_hooks.is_custom_scheduler(each, given) for each in (model, optimizer, within)), (
        "they always were"
    )
    assert set(private) == {"engine", "feeder", "stranger", "endless", "counter", "drawing", "said", *OWN}


class Drawn(Kept):
    """A sampler whose state has these tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": 5, "states": {"all": list(self.tensors)}}


def test_a_state_of_a_generator_is_a_rank_s_own_and_beside_tensors_it_is_told() -> None:
    state = torch.Generator().get_state()
    said = Drawn(state, torch.ones(2))
    said.holdfast_private = False  # type: ignore[attr-defined]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {
        "model": model,
        "optimizer": optimizer,
        "host": Drawn(state),
        "both": Drawn(torch.zeros(16, dtype=torch.uint8), state),
        "mixed": Drawn(state, torch.ones(2)),
        "bytes": Drawn(torch.zeros(5000, dtype=torch.uint8)),
        "square": Drawn(state.view(2, -1)),
        "said": said,
    }
    _, private, replicated = torch_hooks.classify(given)
    assert set(private) == {"host", "both"}
    assert torch_hooks.shared_with_generators(replicated) == ["mixed"]
