"""The state of optimizers is restored exactly: type, layout, identity, and every bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from holdfast.errors import BadInput
from holdfast.state import capture, restore
from tests.torch.holdfast.state.test_capture import bits, snapshot

torch.set_num_threads(1)


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


class Nested(torch.optim.Optimizer):
    """Float32 moments for parameters of any type, in nested tables, some of them shared by parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99)})
        self.state["all"] = {"steps": torch.tensor(0), "name": "nested"}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        everything: Any = self.state["all"]  # type: ignore[index]
        everything["steps"] += 1
        for parameter in capture.parameters(self):
            state = self.state[parameter]
            if not state:
                state["moments"] = {"first": torch.zeros(parameter.shape), "history": [torch.zeros(1), None]}
                state["turned"] = torch.zeros(parameter.shape[::-1]).t() if parameter.dim() == 2 else 1
                state["steps"] = everything["steps"]
            assert parameter.grad is not None
            state["moments"]["first"].lerp_(parameter.grad.float(), 0.3)
            state["moments"]["history"][0] += state["moments"]["first"].sum()
            if parameter.dim() == 2:
                state["turned"] += state["moments"]["first"] ** 2
            parameter -= (self.param_groups[0]["lr"] * state["moments"]["first"]).to(parameter.dtype)


class Masters(torch.optim.AdamW):
    """Manual mixed precision: AdamW over float32 copies, which are then rounded into the model."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self.slim = list(parameters)
        super().__init__([p.detach().float() for p in self.slim], **options)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for master, slim in zip(capture.parameters(self), self.slim, strict=True):
            master.grad = None if slim.grad is None else slim.grad.float()
        super().step()
        for master, slim in zip(capture.parameters(self), self.slim, strict=True):
            slim.copy_(master)


class Sharp(torch.optim.Optimizer):
    """SAM as in public code: an optimizer within an optimizer, with the same groups."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05, "lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in capture.parameters(self):
            self.state[parameter]["old"] = parameter.clone()
        self.base_optimizer.step()


class Slow(torch.optim.SGD):
    """Lookahead: it has its own weights, which only its state_dict names."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.slow = [p.detach().clone() for p in capture.parameters(self)]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        for slow, parameter in zip(self.slow, capture.parameters(self), strict=True):
            slow.lerp_(parameter, 0.5)
            if self.count % 2 == 0:
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow, self.count = list(state_dict["slow"]), state_dict["count"]
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "nested": Nested,
    "masters": lambda ps: Masters(ps, lr=0.01),
    "sam": Sharp,
    "lookahead": Slow,
}


def group(seed: int, name: str, dtype: torch.dtype) -> dict[str, Any]:
    model = model_of(seed, dtype)
    return {"optimizer": MAKERS[name](model.parameters()), "model": model}


def train(objects: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        given = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model, optimizer = objects["model"], objects["optimizer"]
        model(given.to(model[0].weight.dtype)).float().pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()
        if "scheduler" in objects:
            objects["scheduler"].step()


@pytest.mark.parametrize("large_bytes", [0, 1 << 20], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_bit_of_an_optimizer_is_restored(
    name: str, dtype: torch.dtype, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_LARGE_BYTES", large_bytes)
    one, other = group(1, name, dtype), group(2, name, dtype)
    train(one, 5)
    layout, data = snapshot(one)
    before = bits(one)
    assert restore.restore(other, layout, data) == []
    data[layout.data_offset :] = bytes(layout.data_bytes)
    assert bits(other) == before
    assert kinds(other) == kinds(one)
    train(one, 5)
    train(other, 5)
    assert bits(other) == bits(one)


def kinds(objects: dict[str, Any]) -> list[object]:
    return [(name, t.dtype, t.device, t.stride()) for name, t in capture.collect(objects).tensors]


def test_types_wider_than_the_parameters_are_preserved() -> None:
    one, other = group(1, "nested", torch.bfloat16), group(2, "nested", torch.bfloat16)
    train(one, 2)
    restore.restore(other, *snapshot(one))
    moments = other["optimizer"].state[other["model"][0].weight]["moments"]
    assert moments["first"].dtype == torch.float32
    assert torch.equal(moments["first"], one["optimizer"].state[one["model"][0].weight]["moments"]["first"])


def test_a_tensor_that_parameters_share_is_shared_after_a_restore() -> None:
    one, other = group(1, "nested", torch.float32), group(2, "nested", torch.float32)
    train(one, 2)
    restore.restore(other, *snapshot(one))
    states = other["optimizer"].state
    assert states[other["model"][0].weight]["steps"] is states["all"]["steps"]


def test_existing_tensors_are_filled_and_not_replaced() -> None:
    one, other = group(1, "adamw", torch.float32), group(2, "adamw", torch.float32)
    train(one, 2)
    train(other, 1)
    weight = other["model"][0].weight
    moment, rate = other["optimizer"].state[weight]["exp_avg"], other["optimizer"].param_groups[0]["lr"]
    one["optimizer"].param_groups[0]["lr"].fill_(0.003)
    restore.restore(other, *snapshot(one))
    assert other["optimizer"].state[weight]["exp_avg"] is moment
    assert other["optimizer"].param_groups[0]["lr"] is rate
    assert rate.item() == one["optimizer"].param_groups[0]["lr"].item()


def test_large_tensors_are_restored_into_new_memory_and_count_as_written() -> None:
    """Several threads copy them without torch; the size exceeds each thread's stretch and has an odd end."""
    one, other = nn.Linear(1031, 1033), nn.Linear(1031, 1033)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (one, other)]
    one(torch.ones(2, 1031)).sum().backward()
    optimizers[0].step()
    before = other.weight._version
    restore.restore(
        {"model": other, "optimizer": optimizers[1]}, *snapshot({"model": one, "optimizer": optimizers[0]})
    )
    assert other.weight.nbytes > 4 * restore._LARGE_BYTES
    assert bits({"model": other, "optimizer": optimizers[1]}) == bits(
        {"model": one, "optimizer": optimizers[0]}
    )
    assert other.weight._version > before


class Reading:
    """An object that reads a large tensor as soon as it is loaded."""

    def __init__(self) -> None:
        self.tensor = torch.arange(1 << 20)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "sum": int(self.tensor.sum())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["tensor"].sum()) == state["sum"]
        self.tensor = state["tensor"].clone()


def test_tensors_are_complete_when_an_object_loads_them() -> None:
    one, other = Reading(), Reading()
    one.tensor += 7
    assert restore.restore({"average": other}, *snapshot({"average": one})) == []
    assert torch.equal(other.tensor, one.tensor)


def test_masters_that_are_missing_from_a_snapshot_are_named() -> None:
    one, other = group(1, "adamw", torch.bfloat16), group(2, "masters", torch.bfloat16)
    layout, data = snapshot({"model": one["model"]})
    with pytest.raises(BadInput, match=r"optimizer is not in the snapshot"):
        restore.restore(other, layout, data)
    mixed = {"model": one["model"], "optimizer": torch.optim.AdamW(one["model"].parameters())}
    plain = torch.optim.AdamW([p.detach().clone() for p in one["model"].parameters()])
    with pytest.raises(
        BadInput,
        match=r"^optimizer: optimizer\.param\.0 is not in the snapshot; this parameter belongs to no",
    ):
        restore.restore({"model": other["model"], "optimizer": plain}, *snapshot(mixed))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=5),
    "then swa": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), swa_utils.SWALR(o, swa_lr=0.05)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_restored_schedulers_continue_like_the_originals(name: str, optimizer: str) -> None:
    def made(seed: int) -> dict[str, Any]:
        objects = group(seed, optimizer, torch.float32)
        return {**objects, "scheduler": SCHEDULERS[name](objects["optimizer"])}

    one, other = made(1), made(2)
    train(one, 6)
    assert restore.restore(other, *snapshot(one)) == []
    train(one, 6)
    train(other, 6)
    assert bits(other) == bits(one)


def test_an_average_of_the_model_is_restored() -> None:
    def made(seed: int) -> dict[str, Any]:
        model = model_of(seed)
        return {"model": model, "average": swa_utils.AveragedModel(model, use_buffers=True)}

    one, other = made(1), made(2)
    one["average"].update_parameters(model_of(3))
    restore.restore(other, *snapshot(one))
    assert bits(other) == bits(one)
    assert other["average"].n_averaged == 1


def test_a_snapshot_without_the_count_of_an_average_can_be_read() -> None:
    one, other = (swa_utils.AveragedModel(model_of(seed)) for seed in (1, 2))
    earlier = {"average.module": one.module}  # earlier versions saved only parameters
    restore.restore({"average": other}, *snapshot(earlier))
    assert bits({"average.module": other.module}) == bits(earlier)


def test_an_object_that_rounds_what_it_loads_is_named() -> None:
    class Rounds:
        def __init__(self) -> None:
            self.mean = torch.randn(3, dtype=torch.float64)

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean = state["mean"].float()

    [warning] = restore.restore({"average": Rounds()}, *snapshot({"average": Rounds()}))
    assert warning.startswith("after Rounds.load_state_dict, average.mean differs from its saved state")


def test_a_snapshot_without_the_inner_optimizer_causes_a_warning() -> None:
    one, other = group(1, "sam", torch.float32), group(2, "sam", torch.float32)
    train(one, 2)
    tree = capture.collect(one)
    del tree.document["optimizer"]["inner"]
    layout, data = snapshot(one)
    entry = layout[capture.JSON_ENTRY]
    at = layout.data_offset + entry.begin
    text = json.dumps(tree.document).encode()
    data[at : at + entry.end - entry.begin] = text.ljust(entry.end - entry.begin)
    [warning] = restore.restore(other, layout, data)
    assert warning == "optimizer.base_optimizer is not in the snapshot, so it starts with an empty state"


def unfreezing(seed: int, head_only: bool = True) -> dict[str, Any]:
    model = model_of(seed)
    trained = [*model[2].parameters()] if head_only else [*model.parameters()]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.01)}


def test_groups_that_were_added_during_the_run_are_recreated() -> None:
    one, other = unfreezing(1), unfreezing(2)
    train(one, 3)
    for n, lr in ((0, 0.003), (1, 0.002)):
        given = list(one["model"][0].parameters())[n : n + 1]
        one["optimizer"].add_param_group(
            {"params": given, "lr": lr, "weight_decay": 0.3, "name": f"base {n}"}
        )
    train(one, 3)
    assert restore.restore(other, *snapshot(one)) == []
    assert bits(other) == bits(one)
    assert other["optimizer"].param_groups[1]["params"][0] is other["model"][0].weight
    train(one, 4)
    train(other, 4)
    assert bits(other) == bits(one)


def test_added_groups_of_frozen_parameters_or_of_no_module_are_refused_with_what_to_do() -> None:
    for frozen, given in ((True, None), (False, torch.ones(3, requires_grad=True))):
        one, other = unfreezing(1), unfreezing(2)
        given_ = list(one["model"][0].parameters()) if given is None else [given]
        one["optimizer"].add_param_group({"params": given_})
        other["model"][0].requires_grad_(not frozen)
        with pytest.raises(
            BadInput, match=r"\[2, \d\] parameters .*\. Add all groups before protect, with lr=0"
        ):
            restore.restore(other, *snapshot(one))
        assert len(other["optimizer"].param_groups) == 1
