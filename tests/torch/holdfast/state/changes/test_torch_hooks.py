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
    """Records the calls that it receives, in order."""

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
        raise AssertionError("no drill was requested")


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


def test_the_parts_of_a_step_are_reported_in_order() -> None:
    assert told_by(nn.BatchNorm1d(2)) == ["forward", "backward", "write"]


def test_an_inner_optimizer_also_reports_its_step() -> None:
    told = Told()
    model = nn.Linear(2, 2)
    optimizer = Sharp(model.parameters())
    torch_hooks.attach_hooks({}, [optimizer], told)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.base_optimizer.step()
    assert told.words == ["write"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("module", [nn.BatchNorm1d(2), nn.Linear(2, 2)], ids=["buffers", "none"])
def test_the_forward_pass_is_reported_again_after_ddp_has_waited_for_buffers(module: nn.Module) -> None:
    waits = next(module.buffers(), None) is not None
    assert told_by(DistributedDataParallel(module)) == ["forward"] * (1 + waits) + ["backward", "write"]


class Kept:
    """An object with numbers and with its optimizer."""

    after: torch.optim.lr_scheduler.LRScheduler

    def __init__(self, optimizer: Any, **more: Any) -> None:
        self.optimizer, self.count, self.marks = optimizer, 0, [1, (2, "x")]
        self.shape, self.more = abs, more

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Ramp(Kept):
    """A script's own scheduler, in the style of timm."""

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1 / self.count


class Drawing(Ramp):
    def __iter__(self) -> Iterator[int]:
        return iter([])


class Clipping(Kept):
    """A wrapper that steps the optimizer and counts the steps of one rank."""

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
    """A ramp that is followed by a scheduler of torch."""

    def step(self) -> None:
        super().step()
        self.after.step()

    def begin(self) -> None:
        self.step()


class Counter(Ramp):
    step = None  # type: ignore[assignment]


OWN = {"clipping", "apart", "tokens"}  # these set no option, or step the optimizer


def test_schedulers_of_any_class_are_replicated_unless_they_may_be_private_to_a_rank() -> None:
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
        "these are not custom schedulers"
    )
    assert set(private) == {"engine", "feeder", "stranger", "endless", "counter", "drawing", "said", *OWN}


class Drawn(Kept):
    """A sampler whose state contains the given tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": 5, "states": {"all": list(self.tensors)}}


def test_a_generator_state_is_private_to_a_rank_and_reported_if_mixed_with_tensors() -> None:
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
