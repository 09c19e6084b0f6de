"""Collect the replicated state for each snapshot, and reuse the last result until a tensor moves.

From one snapshot to the next, the tensors are nearly always the same objects at the same addresses; only
numbers such as learning rates differ. So the last result stays valid until its sources change. The sources
are the entries in the tables of modules and optimizers, and the memory address of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

from holdfast.state import capture
from holdfast.state.capture import CollectedState, unwrap

if TYPE_CHECKING:
    import torch


dumps = json.JSONEncoder(separators=(",", ":")).encode
_FIXED = (bool, int, float, str, type(None))  # immutable types
# The data is not in a CPU cache, so each access waits for memory. The code therefore reads as little as
# possible, and these helpers iterate without running Python code for each item.
_values, _flat = methodcaller("values"), chain.from_iterable


class CachedCollector:
    """Returns what `capture.collect` returns for `objects`, from a cache while its sources are unchanged."""

    def __init__(self, objects: Mapping[str, Any], more: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Prepare to collect `objects`. `more` returns additional entries for the document."""
        self._objects = objects
        self._more = more
        # The tables of parameters, submodules and averaged models' buffers.
        self._tables: list[Mapping[str, Any]] = []
        # These references keep the sources alive, so no new object can get the same identity.
        self._sources: list[Any] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._live_tensors: list[torch.Tensor] = []
        self._addresses: tuple[list[Any], ...] = ()
        self._states: dict[str, str] = {}  # JSON of each optimizer, without its groups
        self._groups: dict[str, ParamGroupJson] = {}

    def collect(self) -> tuple[list[tuple[str, torch.Tensor]], str]:
        """Return the live tensors with their names, and the document as JSON.

        As long as no tensor moves, each call returns the same list object.

        Raises:
            BadInput: a state contains a value that is neither a tensor nor JSON. The message names the value.
        """
        text = self._text() if self._is_unchanged() else None
        return self._collect_all() if text is None else (self._tensors, text)

    def _collect_all(self) -> tuple[list[tuple[str, torch.Tensor]], str]:
        import torch

        tree = capture.collect(self._objects)
        values = {name: unwrap(value) for name, value in self._objects.items()}
        modules = [each for each in values.values() if isinstance(each, torch.nn.Module)]
        self._tables = [t for top in modules for m in top.modules() for t in (m._parameters, m._modules)]
        averages = torch.optim.swa_utils.AveragedModel
        self._tables += [m._buffers for top in modules for m in top.modules() if isinstance(m, averages)]
        found = self._found()
        # Values of other types, such as lists and mappings, can change while their identity stays the same.
        fixed = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, str, int, float, type(None))
        self._live_tensors = [tensor for _, tensor in tree.tensors]
        self._tensors, self._addresses = tree.tensors, _addresses(self._live_tensors)
        optimizers = {n: value for n, value in values.items() if isinstance(value, torch.optim.Optimizer)}
        documents = {
            n: {k: v for k, v in tree.document[n].items() if k != "param_groups"} for n in optimizers
        }
        self._states = {name: dumps(document)[1:-1] for name, document in documents.items()}
        self._groups = {name: ParamGroupJson(name, optimizer) for name, optimizer in optimizers.items()}
        cacheable = all(isinstance(each, fixed) for each in found) and not any(
            map(_changes, documents.values())
        )
        self._sources = found if cacheable else []
        return tree.tensors, dumps({**tree.document, **self._more()})

    def _is_unchanged(self) -> bool:
        found = self._found() if self._sources else []
        return (
            bool(found)
            and len(found) == len(self._sources)
            and all(map(is_, found, self._sources))
            and _addresses(self._live_tensors) == self._addresses
        )

    def _found(self) -> list[Any]:
        """Return the objects that determine which tensors belong to the modules and optimizers."""
        import torch

        found = [*_flat(self._tables), *_flat(map(_values, self._tables))]
        for value in self._objects.values():
            if isinstance(value, torch.optim.Optimizer):
                _look_into(value, found)
        return found

    def _text(self) -> str | None:
        """Return the current document, or None if it refers to tensors that are not in the cache."""
        import torch

        parts, rest = [], CollectedState()
        for name, value in self._objects.items():
            if name in self._states:
                part = f'{{{self._states[name]},"param_groups":{self._groups[name].text(rest)}}}'
            elif isinstance(unwrap(value), torch.nn.Module):
                continue
            else:
                part = dumps(capture.flatten(name, capture.state_of(value), rest))
            parts.append(f"{dumps(name)}:{part}")
        parts += [f"{dumps(key)}:{dumps(value)}" for key, value in self._more().items()]
        return None if rest.tensors else f"{{{','.join(parts)}}}"


def _look_into(optimizer: torch.optim.Optimizer, found: list[Any]) -> None:
    for group in optimizer.param_groups:
        found += group["params"]
    states = optimizer.state.values()
    found += optimizer.state
    found += _flat(states)
    found += _flat(map(_values, states))
    for inner in capture.wrapped_optimizers(optimizer).values():
        found.append(inner)
        _look_into(inner, found)


def _changes(document: Mapping[str, Any]) -> bool:
    """Return whether parts of an optimizer's document other than its groups may change in every step."""
    inner = document.get("inner", {}).values()
    return "own" in document or "other" in document or any("param_groups" in d or _changes(d) for d in inner)


def _addresses(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """Return the address and layout of each tensor.

    Both can change while the tensor remains the same object, as after `weight.data = weight.data.t()`.
    """
    import torch

    aspects = (torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride, attrgetter("dtype"))
    return tuple(list(map(aspect, tensors)) for aspect in aspects)


class ParamGroupJson:
    """Encodes the groups of the optimizer `name` as JSON, and reuses the text of unchanged values.

    A group has about twenty values. Only one or two of them, such as the learning rate, change between
    snapshots.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer
        self._sizes: list[int] = []
        self._known: list[dict[str, tuple[object, str]]] = []  # for each group: value and JSON, by key

    def text(self, rest: CollectedState) -> str:
        """Return what `capture.param_groups` returns, as JSON. Adds tensors among the values to `rest`.

        The parameters are numbered again only if the size of a group has changed. As long as all sizes stay
        the same, the optimizer must have the same parameters in the same order.

        Raises:
            BadInput: a value is neither a tensor nor JSON.
        """
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes = sizes
            numbers = capture.parameter_numbers(self._optimizer)
            own_numbers = [[numbers[id(p)] for p in group["params"]] for group in groups]
            self._known = [{"params": (each, _pair("params", each))} for each in own_numbers]
        parts = [self._group(n, group, rest) for n, group in enumerate(groups)]
        return f"[{','.join(parts)}]"

    def _group(self, n: int, group: dict[str, Any], rest: CollectedState) -> str:
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
        # Put this key last, as `capture.param_groups` does, because members compare the JSON as text.
        parts.append(known["params"][1])
        return f"{{{','.join(parts)}}}"


def _pair(key: str, value: object) -> str:
    return f"{dumps(key)}:{dumps(value)}"


def _is_fixed(value: object) -> bool:
    return isinstance(value, _FIXED) or (
        isinstance(value, tuple) and all(isinstance(v, _FIXED) for v in value)
    )
