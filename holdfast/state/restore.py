"""Restore a snapshot's replicated state into live objects, bit for bit.

Optimizer state is written straight into the optimizers' tables, because `load_state_dict` would convert it to
the parameter's type: float32 moments of a bfloat16 parameter would become bfloat16. Each tensor is copied
from the mapped snapshot directly into the live tensor, or into a new tensor if the type, shape or stride
differs.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, type_with_article, with_article
from holdfast.fileio.safetensors import Layout
from holdfast.snapshot import tensor_copy
from holdfast.state import advice, capture
from holdfast.state.capture import (
    HOST,
    JSON_ENTRY,
    PAIRS,
    STRIDE,
    TENSOR,
    TUPLE,
    CollectedState,
    dtype_of,
    unwrap,
)

if TYPE_CHECKING:
    import torch

OWN_PREFIX = "holdfast."  # in a snapshot's document, names with this prefix are not names of objects
_REFERENCE = {TENSOR, STRIDE, HOST}
_ONE_FOR_ALL = (
    "was saved only once for all ranks, so every rank starts with that state, even if their states"
    " differed; from now on, the state of each rank is saved"
)
# The memory of a tensor of at least this size has probably never been written. A single thread fills such
# memory slowly.
_LARGE_BYTES = 1 << 20


def restore(
    objects: Mapping[str, Any],
    layout: Layout,
    data: mmap.mmap,
    private: Collection[str] = (),
    own: Mapping[str, Any] = MappingProxyType({}),
    more: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[str]:
    """Copy the snapshot in `data` into the live objects, which do not refer to `data` afterwards.

    Args:
        objects: the replicated objects.
        layout: the layout of the snapshot.
        data: the mapped file of the snapshot.
        private: names of objects that the snapshot may lack, because earlier versions stored these objects as
            private state.
        own: the private objects. Earlier versions stored a private object with a generator's state in the
            snapshot; such an object is restored from there.
        more: takes what else it needs from the snapshot's document.

    Returns:
        A warning for each object whose state differs from the saved state after its `load_state_dict`, for
        each object of `own` that was restored, and for each wrapped optimizer that the snapshot lacks.

    Raises:
        BadInput: the snapshot is from different objects. The message names the first difference.
    """
    import torch

    values = {name: unwrap(value) for name, value in objects.items()}
    held = _SnapshotTensors(layout, capture.views(layout, data, layout.data_offset))
    document = _document(layout, data)
    if more is not None:
        more(document)
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            _restore_module(name, value, held)
    warnings = []
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            continue
        if name not in document and name in private:
            continue
        if name not in document:
            there = sorted(each for each in document if not each.startswith(OWN_PREFIX))
            raise BadInput(f"{name} is not in the snapshot, which has {there}")
        warnings += _restored(name, value, document[name], held)
    for name, value in own.items():
        if name in document:
            warnings += [*_restored(name, value, document[name], held), f"{name} {_ONE_FOR_ALL}"]
    held.copy_postponed()
    return warnings


def _restored(name: str, value: Any, saved: Any, held: _SnapshotTensors) -> list[str]:
    try:
        return _restore_object(name, value, saved, held)
    except BadInput:
        raise
    except Exception as error:  # a user's class may raise anything for an unsuitable state
        raise BadInput(f"{name}: {type_with_article(value)} cannot load this state: {error!r}") from error


class _SnapshotTensors:
    """Copies the snapshot's tensors, and records which live tensor each one went into.

    Copies of large tensors are postponed. `copy_postponed` makes them all together, with several threads, and
    must be called before the content of these tensors is used.
    """

    def __init__(self, layout: Layout, views: Mapping[str, torch.Tensor]) -> None:
        self.layout = layout
        self.views = views
        self._placed: dict[str, torch.Tensor] = {}
        self._filled_ids: set[int] = set()  # the identities of the tensors in `_placed`
        self._postponed: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, source

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the snapshot's tensor `name` into `tensor`, which has the same type and shape."""
        import torch

        target, view = tensor.detach(), self.views[name]
        with torch.no_grad():
            if _plain(tensor) and view.nbytes >= _LARGE_BYTES:
                self._postponed.append((target, view))
                target.view(-1)[:0].copy_(view.view(-1)[:0])  # this copies nothing, but counts as a write
            else:
                target.copy_(view)
        self._placed[name] = tensor
        self._filled_ids.add(id(tensor))

    def copy_postponed(self) -> None:
        """Make all postponed copies. On return, every filled tensor has its content."""
        postponed_copies, self._postponed = self._postponed, []
        if postponed_copies:
            tensor_copy.ParallelCopy(
                [target for target, _ in postponed_copies], [view for _, view in postponed_copies], fresh=True
            ).run()

    def live(self, name: str | None) -> torch.Tensor | None:
        """Return the live tensor that the snapshot's tensor `name` was copied into, or None."""
        return self._placed.get(name) if name is not None else None

    def filled(self, tensor: torch.Tensor) -> bool:
        """Return whether this tensor object has already been filled from the snapshot."""
        return id(tensor) in self._filled_ids

    def put(self, reference: Mapping[str, Any], old: object, device: torch.device | None) -> torch.Tensor:
        """Return the live tensor for `reference`, filled from the snapshot.

        If a tensor was already filled for this reference, the result is that tensor. Otherwise it is `old` if
        that is suitable, or else a new tensor.
        """
        import torch

        name, view = reference[TENSOR], self.views[reference[TENSOR]]
        if name in self._placed:
            return self._placed[name]
        stride = tuple(reference.get(STRIDE) or ()) or view.stride()
        if not capture.is_dense(view.shape, stride):
            raise ValueError(f"{name} has shape {list(view.shape)} and stride {list(stride)}")
        if isinstance(old, torch.Tensor) and not self.filled(old) and _same_layout(old, view, stride):
            self.fill(name, old)
            return old
        where = torch.device("cpu") if reference.get(HOST) or device is None else device
        found = torch.empty_strided(view.shape, stride, dtype=view.dtype, device=where)
        self.fill(name, found)
        return found

    def value(self, flat: Any, old: object = None, device: torch.device | None = None) -> Any:
        """Return the value that `flat` describes. Reuse suitable tensors of `old`, the current value."""
        if isinstance(flat, list):
            return [self.value(each, _item(old, n), device) for n, each in enumerate(flat)]
        if not isinstance(flat, dict):
            return flat
        if TENSOR in flat and flat.keys() <= _REFERENCE:
            return self.put(flat, old, device)
        if flat.keys() == {TUPLE}:
            return tuple(self.value(each, _item(old, n), device) for n, each in enumerate(flat[TUPLE]))
        pairs = flat[PAIRS] if flat.keys() == {PAIRS} else flat.items()
        return {key: self.value(each, _item(old, key), device) for key, each in pairs}


def _item(value: object, key: Any) -> object:
    """Return the item of `value` at `key`, or None."""
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
        found: object = value[key]
        return found
    return None


def _plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes in main memory are in the same order as in a snapshot."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.device.type == "cpu" and tensor.is_contiguous()


def _same_layout(old: torch.Tensor, view: torch.Tensor, stride: tuple[int, ...]) -> bool:
    return old.shape == view.shape and old.dtype == view.dtype and old.stride() == stride


def _document(layout: Layout, data: mmap.mmap) -> dict[str, Any]:
    if JSON_ENTRY not in layout:
        raise BadInput(f"the snapshot has no {JSON_ENTRY}: holdfast did not write it")
    entry, at = layout[JSON_ENTRY], layout.data_offset
    try:
        found = json.loads(data[at + entry.begin : at + entry.end])
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{JSON_ENTRY} of the snapshot is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{JSON_ENTRY} of the snapshot is not an object")
    return found


# -- modules


def _restore_module(name: str, module: torch.nn.Module, held: _SnapshotTensors) -> None:
    mine: list[tuple[str, torch.Tensor]] = [(f"{name}.{key}", p) for key, p in module.named_parameters()]
    # A snapshot of an earlier version lacks the counts, which were private state at that time.
    mine += [(key, count) for key, count in capture.average_counts(name, module) if key in held.layout]
    wrong = model_difference(CollectedState(mine), held.layout)
    if wrong is None:
        wrong = _missing_in_model(name, {key for key, _ in mine}, held.layout)
    if wrong is not None:
        raise BadInput(f"the snapshot is from a different model: {wrong}")
    for key, parameter in mine:
        held.fill(key, parameter)


def model_difference(tree: CollectedState, layout: Layout) -> str | None:
    """Describe the first tensor of the model that `layout` lacks or has in another form; otherwise None."""
    held = {entry.name: entry for entry in layout.entries}
    for name, tensor in tree.tensors:
        found = held.get(name)
        if found is None:
            return f"{name} is not in the snapshot"
        if found.shape != tuple(tensor.shape):
            shapes = f"{list(found.shape)} in the snapshot and {list(tensor.shape)} in the script"
            return f"{name} has shape {shapes}"
        if found.dtype != dtype_of(name, tensor):
            kinds = f"{found.dtype} in the snapshot and {dtype_of(name, tensor)} in the script"
            return f"{name} is {kinds}"
    return None


def _missing_in_model(name: str, mine: set[str], layout: Layout) -> str | None:
    """Return a message about a tensor in the snapshot that the module lacks, or None."""
    for entry in layout.entries:
        if entry.name.startswith(f"{name}.") and entry.name not in mine:
            return f"{entry.name} is not in the script's model"
    return None


# -- other objects


def _restore_object(name: str, value: Any, saved: Any, held: _SnapshotTensors) -> list[str]:
    import torch

    if isinstance(value, torch.optim.Optimizer):
        _add_groups(value, saved, held)
        _check_optimizer(name, value, saved)
        return _restore_optimizer(name, value, saved, held)
    state = held.value(saved)
    held.copy_postponed()
    value.load_state_dict(state)
    return _state_warnings(name, value, saved, held)


def _state_warnings(name: str, value: Any, saved: Any, held: _SnapshotTensors) -> list[str]:
    """Return a warning if a tensor in the object's state_dict differs from the saved tensor."""
    tree = CollectedState()
    if capture.flatten(name, capture.state_of(value), tree) is None:
        return []
    wanted = set(_references(saved))
    for key, tensor in tree.tensors:
        view = held.views.get(key)
        if key in wanted and view is not None and not _same_bits(tensor, view):
            kind = type(value).__name__
            return [
                f"after {kind}.load_state_dict, {key} differs from its saved state: the run may differ from"
                " a run without a restart"
            ]
    return []


def _references(saved: Any) -> Iterator[str]:
    if isinstance(saved, dict):
        if TENSOR in saved and saved.keys() <= _REFERENCE:
            yield saved[TENSOR]
        for each in saved.values():
            yield from _references(each)
    elif isinstance(saved, list):
        for each in saved:
            yield from _references(each)


def _same_bits(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    import torch

    if tensor.dtype != view.dtype or tensor.shape != view.shape:
        return False
    here, there = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (tensor, view))
    return bool(torch.equal(here, there)) if view.numel() else True


def _add_groups(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], held: _SnapshotTensors) -> None:
    """Recreate parameter groups that the script has added during training, for example to unfreeze layers.

    This is done only if all parameters of these groups belong to protected modules and require a gradient
    now. DDP does not reduce the gradients of other parameters, and the script may have unfrozen them in ways
    that cannot be repeated here.
    """
    here, there = len(optimizer.param_groups), len(saved.get("param_groups", ()))
    missing = [[held.live(name) for name in names] for names in saved.get("homes", [])[here - 1 :]]
    if there <= here or len(missing) != there - here:
        return
    if all(each is not None and each.requires_grad for group in missing for each in group):
        for group, known in zip(missing, saved["param_groups"][here:], strict=True):
            optimizer.add_param_group({"params": group})
            made = optimizer.param_groups[-1]
            # Put the keys into the snapshot's order. `_restore_optimizer` sets their values.
            made.update({key: made.pop(key, None) for key in known if key != "params"})


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    there, here = saved["kind"], type(optimizer).__name__
    if there != here:
        raise BadInput(
            f"{name} is {with_article(there)} in the snapshot, but {with_article(here)} in the script"
        )
    if "param_groups" in saved:
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (saved["param_groups"], optimizer.param_groups)
        ]
        if sizes[0] != sizes[1]:
            instead = f"; {advice.ADDED_GROUP}" if len(sizes[0]) > len(sizes[1]) else ""
            found = f"its groups have {sizes[0]} parameters in the snapshot, but {sizes[1]} in the script"
            raise BadInput(f"{name}: {found}{instead}")


def _restore_optimizer(
    name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], held: _SnapshotTensors
) -> list[str]:
    """Let `load_state_dict` restore extra state of the optimizer's class, and then restore its tables."""
    if "own" in saved:
        own = held.value(saved["own"])
        held.copy_postponed()
        optimizer.load_state_dict({**optimizer.state_dict(), **own})
    parameters = list(capture.parameters(optimizer))
    _restore_parameters(name, parameters, held)
    for group, there in zip(optimizer.param_groups, saved.get("param_groups", []), strict=False):
        for key, flat in there.items():
            if key != "params":
                group[key] = held.value(flat, group.get(key))
    on_host = _steps_on_host(optimizer)
    state: dict[Any, Any] = {}
    for number, flat in saved["state"].items():
        parameter = parameters[int(number)]
        if id(parameter) in on_host and TENSOR in (flat.get("step") or {}):
            flat = {**flat, "step": {**flat["step"], HOST: True}}
        state[parameter] = held.value(flat, optimizer.state.get(parameter), parameter.device)
    state |= held.value(saved.get("other", {}))
    optimizer.state.clear()
    optimizer.state.update(state)
    return _restore_inner(name, optimizer, saved, held)


def _restore_parameters(name: str, parameters: list[torch.Tensor], held: _SnapshotTensors) -> None:
    """Fill the parameters that belong to no protected module, such as float32 masters of a bfloat16 model."""
    for n, parameter in enumerate(parameters):
        if not held.filled(parameter):
            wrong = model_difference(CollectedState([(f"{name}.param.{n}", parameter)]), held.layout)
            if wrong is not None:
                raise BadInput(f"{name}: {wrong}; this parameter belongs to no protected module")
            held.fill(f"{name}.param.{n}", parameter)


def _steps_on_host(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of the parameters on a device whose step counts torch keeps on the host."""
    return {
        id(p)
        for group in optimizer.param_groups
        if not (group.get("capturable") or group.get("fused"))
        for p in group["params"]
        if p.device.type != "cpu"
    }


def _restore_inner(
    name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], held: _SnapshotTensors
) -> list[str]:
    warnings: list[str] = []
    there = saved.get("inner", {})
    for key, inner in capture.wrapped_optimizers(optimizer).items():
        if key not in there:  # the snapshot is from a version that did not save wrapped optimizers
            warnings.append(f"{name}.{key} is not in the snapshot, so it starts with an empty state")
            continue
        _check_optimizer(f"{name}.{key}", inner, there[key])
        warnings += _restore_optimizer(f"{name}.{key}", inner, there[key], held)
    return warnings
