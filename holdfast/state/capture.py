"""Collect the replicated state of live objects, and refuse objects whose state a snapshot cannot hold.

`holdfast.state.restore` does the reverse.

Replicated state is the same on every rank of a DDP group: parameters, the states of optimizers and
schedulers, and the state of any other object that contains tensors. Each tensor is named after its object
(`model.blocks.0.weight`, `optimizer.state.3.exp_avg`). All other values are stored in one JSON document.
"""

from __future__ import annotations

import math
import mmap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, type_with_article
from holdfast.fileio.safetensors import Entry, Layout, plan

if TYPE_CHECKING:
    import torch


JSON_ENTRY = "holdfast.json"
# The document is padded to a multiple of this size, so the layout seldom changes.
_JSON_STEP_BYTES = 4096
TENSOR = "holdfast.tensor"  # {"holdfast.tensor": name} represents a tensor in the document
STRIDE = "stride"  # this additional key is used if the tensor is not in row-major order
HOST = "host"  # this additional key is used if the tensor is in main memory and its parameter on a device
TUPLE = "holdfast.tuple"  # marks a tuple, such as an optimizer's betas, which JSON would turn into a list
PAIRS = "holdfast.pairs"  # marks a mapping whose keys are not all strings
_counter = attrgetter("_version")
# Some schedulers, such as SWALR, keep a function in their state.
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, staticmethod)


@dataclass(slots=True)
class CollectedState:
    """Tensors with their names, and the document that refers to them."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)  # the name of each tensor, by its identity

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Add `tensor` unless it is listed already; return its name in the list.

        Raises BadInput if a snapshot cannot hold the tensor.
        """
        known = self._names.setdefault(id(tensor), name)
        if known == name:
            refuse_tensor(name, tensor)
            self.tensors.append((name, tensor))
        return known

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of `tensor` in the list, or None."""
        return self._names.get(id(tensor))


def unwrap(value: Any) -> Any:
    """Return the module inside a DDP wrapper, or `value` itself."""
    from torch.nn.parallel import DistributedDataParallel

    return value.module if isinstance(value, DistributedDataParallel) else value


def collect(objects: Mapping[str, Any]) -> CollectedState:
    """Return the current replicated state of `objects`. The result refers to the live tensors, not copies.

    A tensor that occurs in several places, such as a step count that parameters share, is listed once. As an
    exception, a parameter that several modules share is listed for each of them.

    Raises:
        BadInput: a state contains a value that is neither a tensor nor JSON. The message names the value.
    """
    import torch

    tree = CollectedState()
    values = {name: unwrap(value) for name, value in objects.items()}
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            for key, parameter in value.named_parameters():
                if tree.add(f"{name}.{key}", parameter) != f"{name}.{key}":  # another module shares it
                    tree.tensors.append((f"{name}.{key}", parameter))
            for key, count in average_counts(name, value):
                tree.add(key, count)
    kept = frozenset(id(tensor) for _, tensor in tree.tensors)
    for name, value in values.items():
        if isinstance(value, torch.optim.Optimizer):
            tree.document[name] = _optimizer(name, value, tree, kept)
        elif not isinstance(value, torch.nn.Module):
            tree.document[name] = flatten(name, state_of(value), tree)
    return tree


def refuse_dtypes(objects: Mapping[str, Any]) -> None:
    """Raise BadInput for the first parameter or buffer whose data type a snapshot cannot hold."""
    import torch

    for name, value in objects.items():
        value = unwrap(value)
        if isinstance(value, torch.nn.Module):
            for key, parameter in value.named_parameters():
                dtype_of(f"{name}.{key}", parameter)
            for key, buffer in value.named_buffers():
                if buffer.is_quantized:
                    raise BadInput(f"{name}.{key}: a buffer of type {buffer.dtype} cannot be stored")
        elif isinstance(value, torch.optim.Optimizer):
            for n, own in enumerate(parameters(value)):
                dtype_of(f"{name}.param.{n}", own)


def average_counts(name: str, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the update count of each averaged model in `module`, with its name.

    These counts are buffers. Unlike other buffers, they are replicated state, because they change together
    with the averaged parameters, after the optimizer's write.
    """
    return [
        (f"{name}.{path}.n_averaged" if path else f"{name}.n_averaged", each.n_averaged)
        for path, each in module.named_modules()
        if is_average_count(each, "n_averaged")
    ]


def is_average_count(module: torch.nn.Module, key: str) -> bool:
    """Return whether the buffer `key` of `module` counts the updates of an averaged model."""
    import torch

    average = key == "n_averaged" and isinstance(module, torch.optim.swa_utils.AveragedModel)
    return average and isinstance(module._buffers.get(key), torch.Tensor)


def state_of(value: Any) -> Any:
    """Return an object's state_dict without the functions that some schedulers include."""
    import torch

    state = value.state_dict()
    return _data_of(state) if isinstance(value, torch.optim.lr_scheduler.LRScheduler) else state


def _data_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _data_of(v) for k, v in state.items() if not isinstance(v, _FUNCTIONS)}
    return [_data_of(each) for each in state] if isinstance(state, list) else state


def _optimizer(
    name: str, optimizer: torch.optim.Optimizer, tree: CollectedState, kept: frozenset[int]
) -> Any:
    """Return the document of an optimizer, and add its tensors to `tree`.

    The document is built from the optimizer's tables, because its state_dict may round or omit values. `kept`
    contains the identities of the parameters that belong to a protected module. Other parameters, such as the
    float32 masters of a bfloat16 model, exist only in their optimizer and are stored with it.
    """
    import torch

    numbers = parameter_numbers(optimizer)
    for n, parameter in enumerate(parameters(optimizer)):
        if id(parameter) not in kept:
            tree.add(f"{name}.param.{n}", parameter)
    state: dict[str, Any] = {}
    other: dict[Any, Any] = {}  # state that belongs to no parameter
    for key, values in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            other[key] = values
        elif id(key) in numbers:
            n = numbers[id(key)]
            state[str(n)] = flatten(f"{name}.state.{n}", values, tree, key.device)
    found: dict[str, Any] = {"kind": type(optimizer).__name__, "state": state}
    found |= {"other": flatten(f"{name}.other", other, tree)} if other else {}
    inner = {
        key: _inner(f"{name}.{key}", each, optimizer, tree, kept)
        for key, each in wrapped_optimizers(optimizer).items()
    }
    found |= {"inner": inner} if inner else {}
    rest = extra_state(optimizer)
    found |= {"own": flatten(f"{name}.own", rest, tree)} if rest else {}
    # A script may add groups during the run. `homes` names their parameters, which lets `restore` recreate
    # the groups.
    homes = [
        [tree.name_of(p) if id(p) in kept else None for p in group["params"]]
        for group in optimizer.param_groups[1:]
    ]
    found |= {"homes": homes} if homes else {}
    return {**found, "param_groups": param_groups(name, optimizer, tree)}


def _inner(
    name: str,
    inner: torch.optim.Optimizer,
    outer: torch.optim.Optimizer,
    tree: CollectedState,
    kept: frozenset[int],
) -> Any:
    shares = inner.param_groups is outer.param_groups
    if shares:  # the outer optimizer lists the parameters
        kept |= {id(p) for p in parameters(outer)}
    found = _optimizer(name, inner, tree, kept)
    if shares:
        del found["param_groups"]
        found.pop("homes", None)
    return found


def wrapped_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that `optimizer` wraps, as SAM and Lookahead do, by attribute name.

    The result omits an inner optimizer that shares its state object with the outer one, because that state is
    saved with the outer optimizer.
    """
    import torch

    return {
        key: each
        for key, each in vars(optimizer).items()
        if isinstance(each, torch.optim.Optimizer)
        and each is not optimizer
        and each.state is not optimizer.state
    }


def extra_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries that the optimizer's class adds to the state_dict besides state and groups."""
    import torch

    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    found = optimizer.state_dict()
    return {k: v for k, v in found.items() if k not in ("state", "param_groups")}


def param_groups(name: str, optimizer: torch.optim.Optimizer, tree: CollectedState) -> list[dict[str, Any]]:
    """Return the optimizer's groups as the document represents them. Adds their tensors to `tree`."""
    numbers = parameter_numbers(optimizer)
    return [
        {
            **flatten(f"{name}.group.{n}", {k: v for k, v in g.items() if k != "params"}, tree),
            "params": [numbers[id(p)] for p in g["params"]],
        }
        for n, g in enumerate(optimizer.param_groups)
    ]


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups in the order of their numbers."""
    for group in optimizer.param_groups:
        yield from group["params"]


def parameter_numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the number of each parameter by its identity. The numbering continues across groups."""
    return {id(p): n for n, p in enumerate(parameters(optimizer))}


def flatten(name: str, value: Any, tree: CollectedState, beside: torch.device | None = None) -> Any:
    """Return `value` as the document represents it, and add its tensors to `tree`.

    `beside` is the device of the parameter that the value belongs to, if any. If it is not the CPU, tensors
    on the CPU are marked with `HOST`. Raises BadInput for a value that is neither a tensor nor JSON.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _reference(tree.add(name, value), value, beside)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: flatten(f"{name}.{key}", each, tree, beside) for key, each in value.items()}
        pairs = [[key, flatten(f"{name}.{key}", each, tree, beside)] for key, each in value.items()]
        return {PAIRS: pairs}
    if isinstance(value, (list, tuple)):
        items = [flatten(f"{name}.{n}", each, tree, beside) for n, each in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadInput(
        f"{name}: {type_with_article(value)} cannot be stored in a snapshot: "
        "a state may hold tensors, numbers, strings, and lists and mappings of them"
    )


def _reference(name: str, tensor: torch.Tensor, beside: torch.device | None) -> dict[str, Any]:
    found: dict[str, Any] = {TENSOR: name}
    if not tensor.is_contiguous() and is_dense(tensor.shape, tensor.stride()):
        found[STRIDE] = list(tensor.stride())
    if beside is not None and beside.type != "cpu" and tensor.device.type == "cpu":
        found[HOST] = True
    return found


def version(value: object) -> int | None:
    """Return how many times torch's operators have written to a tensor, or None if `value` is not a tensor.

    The result is -1 for a tensor that was created in `torch.inference_mode()`. Such a tensor has no counter,
    and can be written only in that mode.
    """
    try:
        found: int | None = getattr(value, "_version", None)
    except RuntimeError:
        return -1
    return found


def versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the `version` of each tensor. If all have a counter, this is much faster than separate calls."""
    try:
        return list(map(_counter, tensors))
    except RuntimeError:
        return list(map(version, tensors))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor with this shape and stride has neither holes nor overlaps in memory."""
    expected = 1
    for step, size in sorted((t, s) for s, t in zip(shape, stride, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= size
    return True


def padded(text: str, reserve: int = 0) -> bytes:
    """Return a document's JSON, padded with spaces to a multiple of 4 KiB and to at least `reserve` bytes."""
    raw = text.encode()
    size = max(reserve, -(-len(raw) // _JSON_STEP_BYTES) * _JSON_STEP_BYTES)
    return raw + b" " * (size - len(raw))


def layout_of(tensors: list[tuple[str, torch.Tensor]], json_bytes: int) -> Layout:
    """Return the layout of a snapshot. It depends only on names, types, shapes and `json_bytes`."""
    described = [(name, dtype_of(name, t), tuple(t.shape)) for name, t in tensors]
    return plan([*described, (JSON_ENTRY, "U8", (json_bytes,))], {"holdfast": "1"})


def views(layout: Layout, data: memoryview | mmap.mmap, offset: int = 0) -> dict[str, torch.Tensor]:
    """Return a snapshot's tensors by name. They share the memory of `data`.

    The data area of the snapshot begins at `offset` in `data`.

    Raises:
        BadInput: a tensor has a data type that Holdfast does not support.
    """
    return {e.name: _view(e, data, offset + e.begin) for e in layout.entries}


def _view(entry: Entry, data: memoryview | mmap.mmap, at: int) -> torch.Tensor:
    import torch

    kind = dtypes().get(entry.dtype)
    if kind is None:
        raise BadInput(f"{entry.name} is of type {entry.dtype}, expected one of {', '.join(dtypes())}")
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=count, offset=at).view(entry.shape)


def dtypes() -> dict[str, torch.dtype]:
    """Return the supported data types by their safetensors names."""
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


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    """Return the safetensors name of the tensor's data type. Raises BadInput if it is not supported."""
    if not _names:
        _names.update({kind: text for text, kind in dtypes().items()})
    try:
        return _names[tensor.dtype]
    except KeyError:
        instead = ": keep the real numbers that torch.view_as_real() returns" if tensor.is_complex() else ""
        raise BadInput(
            f"{name}: a tensor of type {tensor.dtype} cannot be stored in a snapshot{instead}"
        ) from None


_SPREAD = "spreads its state over the ranks"
_APART = "lets the replicas differ between two averages"
# The prefix of a class's full name, and the reason why a snapshot cannot hold its state. The prefixes are
# compared with the names of all base classes, because importing FSDP or DeepSpeed only for `isinstance` would
# cost each rank several seconds.
_CLASSES = (
    ("torch.distributed.fsdp.", _SPREAD),
    ("torch.distributed._composable.fsdp.", _SPREAD),
    ("torch.distributed.optim.zero_redundancy_optimizer.", _SPREAD),
    ("torch.distributed.optim.optimizer.DistributedOptimizer", _SPREAD),
    ("torch.distributed.optim.post_localSGD_optimizer.", _APART),
    ("torch.distributed.pipelining.", _SPREAD),
    ("deepspeed.", _SPREAD),
    ("fairscale.nn.data_parallel.", _SPREAD),
    ("fairscale.optim.oss.", _SPREAD),
    ("colossalai.", _SPREAD),
    ("megatron.core.optimizer.distrib_optimizer.", _SPREAD),
)
_TENSORS = (
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",
    "torch.distributed._shard.",
)
_ADVICE = (
    "Holdfast supports only state that is complete on every rank: use DistributedDataParallel and a plain"
    " optimizer, or omit holdfast.join() and let the script restore its own checkpoints"
)


def refuse_unkeepable(objects: Mapping[str, Any]) -> None:
    """Raise BadInput for the first of `objects` whose state a snapshot cannot hold.

    One rank writes the snapshot, so it cannot hold state that is spread over the ranks. It also cannot hold
    tensors whose content is not in plain memory.
    """
    for name, value in objects.items():
        for part in _parts(value):
            _refuse_class(name, part)
        for key, tensor in _tensors(value):
            refuse_tensor(f"{name}.{key}" if key else name, tensor)


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise BadInput unless the tensor is strided and its whole content is in its own memory."""
    import torch
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
        if tensor.is_meta:
            raise BadInput(f"{name} is on the device meta and has no content: materialize it before protect")
        return
    if any(each.startswith(_TENSORS) for each in _descent(tensor)):
        raise BadInput(f"{name} is {type_with_article(tensor)}, which is split among the ranks: {_ADVICE}")
    if is_lazy(tensor):
        raise BadInput(f"{name} has no shape yet: run one forward pass of the module before protect")
    if tensor.layout != torch.strided:
        raise BadInput(f"{name} is a sparse tensor ({tensor.layout}): only dense tensors can be stored")
    if is_traceable_wrapper_subclass(tensor):
        raise BadInput(
            f"{name} is {type_with_article(tensor)}, which wraps other tensors: only plain ones can be stored"
        )


def _refuse_class(name: str, part: Any) -> None:
    for descent in _descent(part):
        for start, what in _CLASSES:
            if descent.startswith(start):
                raise BadInput(f"protect({name}=...): {type_with_article(part)} {what}: {_ADVICE}")


def _descent(value: object) -> Iterator[str]:
    for each in type(value).__mro__:
        yield f"{each.__module__}.{each.__qualname__}"


def _parts(value: Any) -> Iterator[Any]:
    import torch

    yield value
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    else:  # a wrapper that is not itself an optimizer may have one as an attribute
        held = getattr(value, "__dict__", {}).values()
        yield from (each for each in held if isinstance(each, torch.optim.Optimizer))


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for n, parameter in enumerate(p for group in value.param_groups for p in group["params"]):
            yield f"param.{n}", parameter
