"""The JSON of an optimizer's groups, again and again: what is the same object as last time keeps its text.

Of some twenty values of a group one or two differ from one snapshot to the next, such as the learning rate.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast import capture
from holdfast.capture import Tree

if TYPE_CHECKING:
    import torch

dumps = json.JSONEncoder(separators=(",", ":")).encode

_FIXED = (bool, int, float, str, type(None))  # what cannot change within


class GroupText:
    """The groups of one optimizer, named `name` in the document."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer
        self._sizes: list[int] = []
        self._known: list[dict[str, tuple[object, str]]] = []  # of each group: value and text by key

    def text(self, rest: Tree) -> str:
        """Return what `capture.groups` gives, as JSON; tensors among the values go into `rest`.

        As long as the optimizer has the same parameters in the same order. Raises BadInput.
        """
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes = sizes
            numbers = capture.order(self._optimizer)
            mine = [[numbers[id(p)] for p in group["params"]] for group in groups]
            self._known = [{"params": (each, _pair("params", each))} for each in mine]
        parts = [self._group(n, group, rest) for n, group in enumerate(groups)]
        return f"[{','.join(parts)}]"

    def _group(self, n: int, group: dict[str, Any], rest: Tree) -> str:
        known, parts = self._known[n], []
        for key, value in group.items():
            if key == "params":
                continue
            held = known.get(key)
            if held is None or held[0] is not value:
                flat = capture.flatten(f"{self._name}.group.{n}.{key}", value, rest)
                held = value, _pair(key, flat)
                if _is_fixed(value):
                    known[key] = held
            parts.append(held[1])
        parts.append(
            known["params"][1]
        )  # the last, as `capture.groups` has it: texts are compared between members
        return f"{{{','.join(parts)}}}"


def _pair(key: str, value: object) -> str:
    return f"{dumps(key)}:{dumps(value)}"


def _is_fixed(value: object) -> bool:
    return isinstance(value, _FIXED) or (
        isinstance(value, tuple) and all(isinstance(v, _FIXED) for v in value)
    )
