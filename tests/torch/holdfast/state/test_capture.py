from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from holdfast.errors import BadInput
from holdfast.fileio import safetensors
from holdfast.state import capture, restore

torch.set_num_threads(1)  # more threads only slow down tensors of this size


class Tied(nn.Module):
    """Shared, empty, scalar and frozen parameters of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body.weight
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.slim = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x)).sum() * self.scale + self.slim.float().sum()
        return y + self.turned.sum() * self.fixed.sum() + self.empty.sum()


def snapshot(objects: Mapping[str, Any]) -> tuple[safetensors.Layout, mmap.mmap]:
    """Return the bytes that the arena would hold for `objects`."""
    tree = capture.collect(objects)
    text = capture.padded(json.dumps(tree.document))
    layout = capture.layout_of(tree.tensors, len(text))
    data = mmap.mmap(-1, layout.total_bytes)
    data[: layout.data_offset] = layout.header
    entry = layout[capture.JSON_ENTRY]
    data[layout.data_offset + entry.begin : layout.data_offset + entry.end] = text
    views = capture.views(layout, data, layout.data_offset)
    for name, tensor in tree.tensors:
        views[name].copy_(tensor.detach())
    return safetensors.parse(data), data


def group(seed: int, optimizer: str, scheduler: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    chosen = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
    return {"model": model, "optimizer": chosen, "scheduler": SCHEDULERS[scheduler](chosen)}


def train(objects: Mapping[str, Any], steps: int) -> None:
    chance = torch.Generator()
    for step in range(steps):
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(2, 4, generator=chance.manual_seed(step))).backward()
        objects["optimizer"].step()
        objects["scheduler"].step()


def bits(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole state in a form that compares equal only if all bits are equal."""
    tree = capture.collect(objects)
    raw = {
        n: t.detach().contiguous().view(-1).view(torch.uint8).tolist() if t.numel() else []
        for n, t in tree.tensors
    }
    return {**raw, "document": json.dumps(tree.document)}


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
}
SCHEDULERS: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_restored_objects_train_like_the_originals(optimizer: str, scheduler: str) -> None:
    one, other = group(1, optimizer, scheduler), group(2, optimizer, scheduler)
    train(one, 3)
    layout, data = snapshot(one)
    before = bits(one)
    restore.restore(other, layout, data)
    data[layout.data_offset :] = bytes(layout.data_bytes)  # the objects must not share this memory
    assert bits(other) == before
    train(one, 3)
    train(other, 3)
    assert bits(other) == bits(one)


def test_optimizers_without_state_are_also_restored() -> None:
    one, other = group(1, "adamw", "cosine"), group(2, "adamw", "cosine")
    train(other, 2)
    restore.restore(other, *snapshot(one))
    assert bits(other) == bits(one)


def test_grad_scalers_and_custom_objects_with_tensors_are_restored() -> None:
    class Average:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    one, other = Average(), Average()
    one.state = {
        "mean": torch.arange(6).view(2, 3),
        "nested": [
            1,
            None,
            True,
            "x",
            1e300,
            -0.0,
            float("inf"),
            {"t": torch.tensor(3.5, dtype=torch.float64)},
        ],
        "by number": {3: torch.tensor([True, False]), 7: "seven"},
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    restored = torch.amp.GradScaler("cpu")
    layout, data = snapshot({"scaler": scaler, "average": one})
    restore.restore({"scaler": restored, "average": other}, layout, data)
    assert restored.state_dict() == scaler.state_dict()
    assert repr(other.state) == repr(one.state)


def test_the_layout_stays_the_same_while_numbers_change() -> None:
    objects = group(1, "adamw", "cosine")
    train(objects, 2)
    first = snapshot(objects)[0]
    train(objects, 2)
    assert snapshot(objects)[0].header == first.header


# -- what does not fit


class Small(nn.Module):
    def __init__(self, width: int = 4, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, width, bias=bias, dtype=dtype)


@pytest.mark.parametrize(
    ("there", "here", "why"),
    [
        (Small(4), Small(5), "model.second.weight has shape [4, 3] in the snapshot and [5, 3] in the script"),
        (
            Small(dtype=torch.bfloat16),
            Small(),
            "model.second.weight is BF16 in the snapshot and F32 in the script",
        ),
        (Small(bias=False), Small(), "model.second.bias is not in the snapshot"),
        (Small(), Small(bias=False), "model.second.bias is not in the script's model"),
        (Small(), nn.Linear(3, 3), "model.weight is not in the snapshot"),
    ],
)
def test_a_snapshot_of_another_model_names_the_first_tensor_that_differs(
    there: nn.Module, here: nn.Module, why: str
) -> None:
    before = bits({"model": here})
    with pytest.raises(BadInput) as caught:
        restore.restore({"model": here}, *snapshot({"model": there}))
    assert str(caught.value) == f"the snapshot is from a different model: {why}"
    assert bits({"model": here}) == before


def test_a_different_optimizer_is_named() -> None:
    one, other = group(1, "adamw", "step"), group(1, "sgd", "step")
    train(one, 1)
    with pytest.raises(BadInput, match="optimizer is an AdamW in the snapshot, but an SGD in the script"):
        restore.restore(other, *snapshot(one))
    model = Small()
    whole, part = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.first.parameters())
    with pytest.raises(
        BadInput, match=r"its groups have \[4\] parameters in the snapshot, but \[2\] in the script"
    ):
        restore.restore({"o": part}, *snapshot({"o": whole}))
    with pytest.raises(BadInput, match=r"p is not in the snapshot, which has \['o'\]"):
        restore.restore({"p": part}, *snapshot({"o": whole}))


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), 1j, torch.tensor([1j])])
def test_a_value_that_no_snapshot_can_hold_is_named(value: object) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"deep": [0, value]}

    with pytest.raises(BadInput, match=r"^odd\.deep\.1: an? .* cannot be stored in a snapshot"):
        snapshot({"odd": Odd()})


# -- untrusted content


def forged(document: Any, tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()) -> Any:
    """Return a well-formed file with the given document."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    layout = safetensors.plan([*tensors, (capture.JSON_ENTRY, "U8", (len(text),))], {})
    data = mmap.mmap(-1, layout.total_bytes)
    data[: layout.data_offset] = layout.header
    entry = layout[capture.JSON_ENTRY]
    data[layout.data_offset + entry.begin : layout.data_offset + entry.end] = text
    return layout, data


def test_files_that_holdfast_did_not_write_are_refused() -> None:
    layout = safetensors.plan([("model.weight", "F32", (2,))], {})
    data = mmap.mmap(-1, layout.total_bytes)
    with pytest.raises(BadInput, match=r"has no holdfast\.json: holdfast did not write it"):
        restore.restore({}, layout, data)
    for text in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(BadInput, match="of the snapshot is not"):
            restore.restore({}, *forged(text))
    with pytest.raises(BadInput, match="x is of type C64, expected one of F64"):
        restore.restore({}, *forged({}, (("x", "C64", (1,)),)))


ANY = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.just({"holdfast.tensor": "nowhere"}),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["state", "param_groups", "params", "0", "kind"]), inner, max_size=3
        )
        | st.builds(lambda pairs: {"holdfast.pairs": pairs}, inner)
    ),
    max_leaves=6,
)


@given(ANY)
def test_hostile_documents_raise_only_bad_input(document: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    for objects in ({"optimizer": optimizer}, {"scheduler": scheduler}):
        [name] = objects
        if isinstance(document, dict):
            document.setdefault("kind", "SGD")
        try:
            restore.restore(objects, *forged({name: document}))
        except BadInput as error:
            refused = str(error)
        else:
            continue
        assert refused.startswith(name)
