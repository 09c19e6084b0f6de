"""The cached JSON of an optimizer's groups equals newly generated JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.state import cached_capture, capture
from holdfast.state.cached_capture import ParamGroupJson
from holdfast.state.capture import CollectedState


def _optimizer() -> torch.optim.Optimizer:
    first, second, third = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups: list[dict[str, Any]] = [
        {"params": [first, second], "tag": "wide"},
        {"params": [third], "lr": 0.5},
    ]
    return torch.optim.AdamW(groups)


def _change(key: str, value: object) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[1][key] = value

    return change


def _append(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0].setdefault("history", [1]).append(2)


def _remove(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]["tag"]


def _move(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())


@pytest.mark.parametrize(
    "change",
    [
        _change("lr", 0.25),
        _change("betas", (0.5, 0.75)),
        _change("nested", ([1], {"a": 2})),
        _change("foreach", None),
        _append,
        _remove,
        _move,
    ],
    ids=["a number", "a tuple", "what can change within", "nothing", "within a list", "a key less", "moved"],
)
def test_the_text_follows_each_change_of_the_groups(change: Callable[[torch.optim.Optimizer], None]) -> None:
    optimizer, rest = _optimizer(), CollectedState()
    text = ParamGroupJson("optimizer", optimizer)
    for _ in range(2):
        assert json.loads(text.text(rest)) == _as_json(
            capture.param_groups("optimizer", optimizer, CollectedState())
        )
        change(optimizer)
        assert json.loads(text.text(rest)) == _as_json(
            capture.param_groups("optimizer", optimizer, CollectedState())
        )
        if change in (_remove, _move):
            return
    assert not rest.tensors


def test_a_tensor_among_the_values_is_collected_each_time() -> None:
    optimizer = _optimizer()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    text = ParamGroupJson("optimizer", optimizer)
    for _ in range(2):
        rest = CollectedState()
        text.text(rest)
        assert [name for name, _ in rest.tensors] == ["optimizer.group.0.lr"]


def test_only_changed_values_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = _optimizer()
    text = ParamGroupJson("optimizer", optimizer)
    text.text(CollectedState())
    written: list[object] = []

    def dumps(value: object) -> str:
        written.append(value)
        return json.dumps(value)

    monkeypatch.setattr(cached_capture, "dumps", dumps)
    optimizer.param_groups[0]["lr"] = 0.125
    text.text(CollectedState())
    assert written == ["lr", 0.125]


def _as_json(value: object) -> object:
    return json.loads(json.dumps(value))
