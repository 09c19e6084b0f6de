"""Read the replicated state out of live objects, and put it back.

Replicated is what is the same on every rank of a DDP group: parameters, what optimizers keep, schedulers,
anything else whose state has tensors. Names follow the objects (`model.blocks.0.weight`,
`optimizer.state.3.exp_avg`), and what is not a tensor goes into one JSON document.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.safetensors import Entry, Layout, plan

if TYPE_CHECKING:
    import torch

JSON_ENTRY = "holdfast.json"
_JSON_STEP_BYTES = 4096  # the document is padded to whole steps, so that the layout seldom changes
_TENSOR = "holdfast.tensor"  # {"holdfast.tensor": name} stands for a tensor in the document
_TUPLE = "holdfast.tuple"  # a tuple: an optimizer's betas are one, and stay one
_PAIRS = "holdfast.pairs"  # a mapping whose keys are not all texts


@dataclass(slots=True)
class Tree:
    """Tensors by name, and the document that refers to them."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)


def unwrap(value: Any) -> Any:
    """Return the module inside of a DDP wrapper, or `value` itself."""
    from torch.nn.parallel import DistributedDataParallel

    return value.module if isinstance(value, DistributedDataParallel) else value


def collect(objects: Mapping[str, Any]) -> Tree:
    """Return the present replicated state of `objects`; tensors are the live ones, not copies.

    Raises:
        BadInput: a state holds something that is neither a tensor nor JSON; it is named.
    """
    import torch

    tree = Tree()
    for name, value in objects.items():
        value = unwrap(value)
        if isinstance(value, torch.nn.Module):
            for key, parameter in value.named_parameters():
                tree.tensors.append((f"{name}.{key}", parameter))
        elif isinstance(value, torch.optim.Optimizer):
            tree.document[name] = _optimizer(name, value, tree)
        else:
            tree.document[name] = flatten(name, value.state_dict(), tree)
    return tree


def _optimizer(name: str, optimizer: torch.optim.Optimizer, tree: Tree) -> Any:
    """Like `Optimizer.state_dict`, without the cost of its copies and hooks."""
    numbers = order(optimizer)
    state = {
        str(numbers[id(p)]): flatten(f"{name}.state.{numbers[id(p)]}", values, tree)
        for p, values in optimizer.state.items()
        if id(p) in numbers
    }
    return {"kind": type(optimizer).__name__, "state": state, "param_groups": groups(name, optimizer, tree)}


def groups(name: str, optimizer: torch.optim.Optimizer, tree: Tree) -> list[dict[str, Any]]:
    """Return the optimizer's groups as the document has them; tensors among their values go into `tree`."""
    numbers = order(optimizer)
    return [
        {
            **flatten(f"{name}.group.{n}", {k: v for k, v in g.items() if k != "params"}, tree),
            "params": [numbers[id(p)] for p in g["params"]],
        }
        for n, g in enumerate(optimizer.param_groups)
    ]


def order(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the number of each parameter, by its identity, counted through all groups."""
    return {id(p): n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}


def flatten(name: str, value: Any, tree: Tree) -> Any:
    """Return `value` as the document has it; its tensors go into `tree`. Raises BadInput."""
    import torch

    if isinstance(value, torch.Tensor):
        tree.tensors.append((name, value))
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: flatten(f"{name}.{key}", each, tree) for key, each in value.items()}
        pairs = [[key, flatten(f"{name}.{key}", each, tree)] for key, each in value.items()]
        return {_PAIRS: pairs}
    if isinstance(value, (list, tuple)):
        items = [flatten(f"{name}.{n}", each, tree) for n, each in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadInput(
        f"{name}: a {type(value).__name__} cannot be kept in a snapshot: "
        "a state may hold tensors, numbers, texts, lists and mappings of them"
    )


def padded(text: str, reserve: int = 0) -> bytes:
    """Return a document's JSON padded with blanks to at least `reserve` bytes, in whole steps."""
    raw = text.encode()
    size = max(reserve, -(-len(raw) // _JSON_STEP_BYTES) * _JSON_STEP_BYTES)
    return raw + b" " * (size - len(raw))


def layout_of(tensors: list[tuple[str, torch.Tensor]], json_bytes: int) -> Layout:
    """Return the snapshot's layout. The same names, types and shapes give the same bytes."""
    described = [(name, _dtype(name, t), tuple(t.shape)) for name, t in tensors]
    return plan([*described, (JSON_ENTRY, "U8", (json_bytes,))], {"holdfast": "1"})


def views(layout: Layout, data: memoryview | mmap.mmap, offset: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors over the bytes of a snapshot's data area, without a copy.

    Raises:
        BadInput: one is of a type that no snapshot of ours has.
    """
    return {e.name: _view(e, data, offset + e.begin) for e in layout.entries}


def _view(entry: Entry, data: memoryview | mmap.mmap, at: int) -> torch.Tensor:
    import torch

    kind = dtypes().get(entry.dtype)
    if kind is None:
        raise BadInput(f"{entry.name} is of type {entry.dtype}, accepted are {', '.join(dtypes())}")
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=count, offset=at).view(entry.shape)


def dtypes() -> dict[str, torch.dtype]:
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }


_names: dict[torch.dtype, str] = {}


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if not _names:
        _names.update({kind: text for text, kind in dtypes().items()})
    try:
        return _names[tensor.dtype]
    except KeyError:
        raise BadInput(f"{name}: a tensor of type {tensor.dtype} cannot be kept in a snapshot") from None


def differs(tree: Tree, layout: Layout) -> str | None:
    """Name the first model tensor that is not the same in `layout`; None when all are."""
    held = {entry.name: entry for entry in layout.entries}
    for name, tensor in tree.tensors:
        found = held.get(name)
        if found is None:
            return f"{name} is not in it"
        if found.shape != tuple(tensor.shape):
            return f"{name} has shape {list(found.shape)} there and {list(tensor.shape)} here"
        if found.dtype != _dtype(name, tensor):
            return f"{name} is {found.dtype} there and {_dtype(name, tensor)} here"
    return None


def restore(objects: Mapping[str, Any], layout: Layout, data: mmap.mmap) -> None:
    """Put the snapshot in `data` into the live objects. Nothing of ours stays mapped by them.

    Raises:
        BadInput: the snapshot is of something else; the first difference is named.
    """
    import torch

    held = views(layout, data, layout.data_offset)
    document = _document(layout, data)
    for name, value in objects.items():
        value = unwrap(value)
        if isinstance(value, torch.nn.Module):
            _restore_module(name, value, layout, held)
            continue
        if name not in document:
            raise BadInput(f"{name} is not in the snapshot, which has {sorted(document)}")
        try:
            _restore_object(name, value, _unflatten(document[name], held))
        except BadInput:
            raise
        except Exception as error:  # whatever a class makes of a state that is not its own
            raise BadInput(f"{name}: a {type(value).__name__} cannot take this state: {error!r}") from error


def _document(layout: Layout, data: mmap.mmap) -> dict[str, Any]:
    if JSON_ENTRY not in layout:
        raise BadInput(f"the snapshot has no {JSON_ENTRY}: not one of holdfast")
    entry, at = layout[JSON_ENTRY], layout.data_offset
    try:
        found = json.loads(data[at + entry.begin : at + entry.end])
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{JSON_ENTRY} of the snapshot is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{JSON_ENTRY} of the snapshot is not an object")
    return found


def _restore_object(name: str, value: Any, state: Any) -> None:
    import torch

    if isinstance(value, torch.optim.Optimizer):
        _check_optimizer(name, value, state)
        state = {
            "state": {int(k): v for k, v in state["state"].items()},
            "param_groups": state["param_groups"],
        }
    value.load_state_dict(state)


def _restore_module(
    name: str, module: torch.nn.Module, layout: Layout, held: Mapping[str, torch.Tensor]
) -> None:
    import torch

    mine = [(f"{name}.{key}", p.detach()) for key, p in module.named_parameters()]
    wrong = differs(Tree(mine), layout)
    if wrong is None:
        wrong = _left_over(name, {key for key, _ in mine}, layout)
    if wrong is not None:
        raise BadInput(f"the snapshot is of another model: {wrong}")
    with torch.no_grad():
        for key, parameter in mine:
            parameter.copy_(held[key])


def _left_over(name: str, mine: set[str], layout: Layout) -> str | None:
    """Name a tensor of the snapshot's module that this module does not have."""
    for entry in layout.entries:
        if entry.name.startswith(f"{name}.") and entry.name not in mine:
            return f"{entry.name} is not in the model here"
    return None


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    there, here = state["kind"], type(optimizer).__name__
    if there != here:
        raise BadInput(f"{name} is a {there} in the snapshot, a {here} here")
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups)
    ]
    if sizes[0] != sizes[1]:
        raise BadInput(f"{name}: its groups have {sizes[0]} parameters in the snapshot, {sizes[1]} here")


def _unflatten(value: Any, held: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(each, held) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        return held[value[_TENSOR]].clone()
    if set(value) == {_TUPLE}:
        return tuple(_unflatten(each, held) for each in value[_TUPLE])
    if set(value) == {_PAIRS}:
        return {key: _unflatten(each, held) for key, each in value[_PAIRS]}
    return {key: _unflatten(each, held) for key, each in value.items()}
