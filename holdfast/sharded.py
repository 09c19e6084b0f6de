"""Refuse, by name, what cannot be kept: state spread over the ranks, and tensors without plain memory.

Classes are told by the names in their line of descent: to import FSDP or DeepSpeed only to look would cost
every rank seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, kind_of

if TYPE_CHECKING:
    import torch

_SPREAD = "spreads its state over the ranks"
_APART = "lets the replicas differ between two averages"
# The start of a class's full name, and what it does that cannot be kept.
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
    "Holdfast keeps state that is whole on every rank: use DistributedDataParallel and a plain optimizer, "
    "or do not call holdfast.join() and let the script restore its own checkpoints"
)


def refuse(objects: Mapping[str, Any]) -> None:
    """Raise BadInput for the first of `objects` that holds what no snapshot of one rank can."""
    for name, value in objects.items():
        for part in _parts(value):
            _refuse_class(name, part)
        for key, tensor in _tensors(value):
            refuse_tensor(f"{name}.{key}" if key else name, tensor)


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise BadInput unless the tensor is strided, and has its whole content in memory of its own."""
    import torch
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
        if tensor.is_meta:
            raise BadInput(f"{name} is on the device meta and has no content: materialize it before protect")
        return
    if any(each.startswith(_TENSORS) for each in _descent(tensor)):
        raise BadInput(f"{name} is {kind_of(tensor)}, of which each rank has a part: {_ADVICE}")
    if is_lazy(tensor):
        raise BadInput(f"{name} has no shape yet: run one forward pass of the module before protect")
    if tensor.layout != torch.strided:
        raise BadInput(f"{name} is a sparse tensor ({tensor.layout}): only dense ones can be kept")
    if is_traceable_wrapper_subclass(tensor):
        raise BadInput(
            f"{name} is {kind_of(tensor)}, a tensor made of others: only plain tensors can be kept"
        )


def _refuse_class(name: str, part: Any) -> None:
    for descent in _descent(part):
        for start, what in _CLASSES:
            if descent.startswith(start):
                raise BadInput(f"protect({name}=...): {kind_of(part)} {what}: {_ADVICE}")


def _descent(value: object) -> Iterator[str]:
    for each in type(value).__mro__:
        yield f"{each.__module__}.{each.__qualname__}"


def _parts(value: Any) -> Iterator[Any]:
    import torch

    yield value
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    else:  # an optimizer in a wrapper of somebody's
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
