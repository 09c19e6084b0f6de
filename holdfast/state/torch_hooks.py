"""Classify protected objects as replicated or private, and observe the parts of a step with torch's hooks.

The hooks are attached to the script's own objects, but not to copies, saved files or compiled forms of them.
If a script saves its whole model (`torch.save(model)`), copies it, or compiles it with `torch.jit.script`,
the result must be the same as without Holdfast, and must load where Holdfast is not installed. Torch's global
module hooks would achieve this too, but would cost time in every module of a model in every pass.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from enum import Enum
from itertools import islice
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import BadInput
from holdfast.state import advice, capture
from holdfast.state.random_state import is_generator_state

if TYPE_CHECKING:
    import torch


class StepObserver(Protocol):
    """Receives the events of a step. `should_poison` returns whether a drill must corrupt the gradients."""

    def forward(self) -> None: ...
    def backward(self) -> None: ...
    def before_write(self) -> None: ...
    def should_poison(self) -> bool: ...
    def poisoned(self) -> None: ...


def classify(
    objects: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the modules, the private objects, and the replicated objects (including modules), by name.

    An object is private if it is not an optimizer, scheduler or scaler, and its state contains no tensors
    other than states of generators. Examples are a sampler, a data loader and a counter. Schedulers of any
    class are replicated (see `is_custom_scheduler`). If an object has the attribute `holdfast_private`
    (bool), that attribute takes precedence over these rules.

    Raises:
        BadInput: an object lacks state_dict or load_state_dict, or its state is spread over the ranks.
    """
    import torch

    capture.refuse_unkeepable(objects)

    modules: dict[str, Any] = {}
    private: dict[str, Any] = {}
    replicated: dict[str, Any] = {}
    for name, value in objects.items():
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise BadInput(advice.unprotectable(name, value))
        if isinstance(value, torch.nn.Module):
            modules[name] = replicated[name] = value
        elif _is_private(value, objects):
            private[name] = value
        else:
            replicated[name] = value
    return modules, private, replicated


def is_custom_scheduler(value: Any, objects: Mapping[str, Any]) -> bool:
    """Return whether `value` is a scheduler of a class that is not torch's. Such a scheduler is replicated.

    An object is treated as such a scheduler if all these conditions are met:

    - It has a `step` method, and refers to at least one of the optimizers among `objects`.
    - Its other attributes are plain values, torch's schedulers and functions. An object that also refers to a
      model or to data may have state that is private to a rank.
    - Its code sets the optimizer's options but does not step the optimizer. An object that clips, skips or
      scales gradients and then steps the optimizer may count events of a single rank.
    - Its state contains no tensors. An object whose state contains tensors is replicated anyway.
    """
    import torch

    if isinstance(value, (torch.nn.Module, *_shared())):
        return False
    data = any(hasattr(type(value), each) for each in ("__iter__", "__next__"))
    if data or not callable(getattr(type(value), "step", None)) or hasattr(value, "holdfast_private"):
        return False
    try:
        held = [*_spread(list(getattr(value, "__dict__", {}).values()))]
    except RecursionError:  # a container that contains itself
        return False
    optimizers = [each for each in map(capture.unwrap, objects.values()) if is_optimizer(each)]
    sets = [each for each in held if any(each is optimizer for optimizer in optimizers)]
    simple = bool(sets) and all(any(each is one for one in sets) or _is_simple(each) for each in held)
    return simple and _only_sets_options(value) and not _has_tensor(value.state_dict())


def _only_sets_options(value: Any) -> bool:
    """Return whether the code of `value` uses an optimizer's groups and steps only schedulers."""
    sets = False
    for code in _codes(type(value)):
        receiver = ""
        for each in dis.get_instructions(code):
            sets = sets or each.argval == "param_groups"
            ours = receiver in code.co_varnames[:1] or _is_scheduler(vars(value).get(receiver))
            steps = each.argval == "step" and each.opname.startswith("LOAD")
            if steps and not ours and "super" not in code.co_names:
                return False
            receiver = str(each.argval) if each.opname in ("LOAD_ATTR", "LOAD_FAST") else ""
    return sets


def _is_scheduler(value: Any) -> bool:
    import torch

    return isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def _codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of all methods of a class and its base classes."""
    for each in kind.__mro__:
        for method in vars(each).values():
            code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
            if isinstance(code, CodeType):
                yield from _within(code)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


def _spread(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _spread(each)
    elif type(value) is dict:
        yield from _spread([*value, *value.values()])
    else:
        yield value


def _is_simple(value: Any) -> bool:
    import torch

    simple = (bool, int, float, str, type(None), Enum, torch.optim.lr_scheduler.LRScheduler)
    return isinstance(value, simple) or inspect.isroutine(value) or inspect.isclass(value)


def _shared() -> tuple[type, ...]:
    import torch

    return torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler


def _is_private(value: Any, objects: Mapping[str, Any]) -> bool:
    declared = getattr(value, "holdfast_private", None)
    if declared is not None:
        return bool(declared)
    if isinstance(value, _shared()) or is_custom_scheduler(value, objects):
        return False
    return all(map(is_generator_state, _tensors(value.state_dict())))


def shared_with_generators(replicated: Mapping[str, Any]) -> list[str]:
    """Return the names of objects that contain generator states but are replicated because of other tensors.

    A generator's state is usually different on each rank. Objects with the attribute `holdfast_private` are
    omitted.
    """
    import torch

    return [
        name
        for name, value in replicated.items()
        if not isinstance(value, (torch.nn.Module, *_shared()))
        and not hasattr(value, "holdfast_private")
        and any(map(is_generator_state, _tensors(value.state_dict())))
    ]


def _has_tensor(value: Any) -> bool:
    return any(True for _ in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def is_optimizer(value: Any) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)


def attach_hooks(
    modules: Mapping[str, Any],
    optimizers: Iterable[Any],
    to: StepObserver,
    after_write: Callable[..., None] | None = None,
) -> None:
    """Report to `to` when a forward pass, a backward pass, or the writes of an optimizer begin.

    The backward pass is reported when a differentiable forward pass has ended, so it includes the computation
    of the loss, which takes little time. A hook on the output would report the exact moment, but it would
    take more time than all other hooks together.

    A DDP wrapper first waits for rank 0's buffers. After this wait, the wrapped module reports the forward
    pass again, to keep the wait out of the rank's own time.

    If `after_write` is given, it is called when an optimizer has queued its writes.
    """
    import torch

    def after(_module: Any, _given: Any, output: Any) -> None:
        if torch.is_grad_enabled() and (differentiable := _differentiable(output, torch.Tensor)) is not None:
            if to.should_poison():
                to.poisoned()
                differentiable.register_hook(lambda gradient: gradient * math.nan)
            to.backward()

    for module in modules.values():
        _before_forward(module, to)
        module.register_forward_hook(Hook(after))
        _hide(module._forward_hooks)
        if _waits_for_buffers(module):
            _before_forward(module.module, to)
    for optimizer in optimizers:
        # Wrapped optimizers need hooks too, because a script that uses SAM never calls SAM's own `step`.
        for each in (optimizer, *capture.wrapped_optimizers(optimizer).values()):
            each.register_step_pre_hook(Hook(lambda *_: to.before_write()))
            hide_from_copies(getattr(each, "_optimizer_step_pre_hooks", {}))
            if after_write is not None:
                each.register_step_post_hook(Hook(after_write))
                hide_from_copies(getattr(each, "_optimizer_step_post_hooks", {}))


def _before_forward(module: torch.nn.Module, to: StepObserver) -> None:
    module.register_forward_pre_hook(Hook(lambda *_: to.forward()))
    _hide(module._forward_pre_hooks)


def _hide(hooks: dict[int, Any]) -> None:
    hide_from_copies(hooks)
    hide_from_script(hooks)


def _waits_for_buffers(module: torch.nn.Module) -> bool:
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(module, DistributedDataParallel) and bool(module.will_sync_module_buffers())


def _differentiable(value: Any, tensor: type[torch.Tensor]) -> torch.Tensor | None:
    """Return the first tensor in a model's output that requires a gradient, or None."""
    if isinstance(value, tensor):
        return value if value.requires_grad else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return None
    return next(filter(lambda each: each is not None, (_differentiable(v, tensor) for v in value)), None)


def poison(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Write NaN into one element of a parameter, to simulate silent corruption."""
    import torch

    parameters = (p for o in optimizers for group in o.param_groups for p in group["params"])
    with torch.no_grad():
        for parameter in islice(parameters, 1):
            parameter.view(-1)[:1].fill_(math.nan)


class Hook:
    """Passes the arguments of a torch hook to `report`. A copy does nothing, and does not need Holdfast."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report

    def __call__(self, *given: Any) -> None:
        self._report(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle this as a function of the standard library that accepts any arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")


def hide_from_copies(hooks: dict[int, Any]) -> None:
    """Omit Holdfast's hooks from copies of `hooks`, a table that torch stores as an attribute of an object.

    The table is changed in place, because the handles that remove hooks refer to it.
    """
    if type(hooks) is not OrderedDict:  # other types do not accept attributes, and copied hooks do no harm
        return
    given: Any = hooks  # pickle and copy look for `__reduce_ex__` in the object before its class
    given.__reduce_ex__ = lambda _: (OrderedDict, (), None, None, iter(_others(hooks)))


def hide_from_script(hooks: dict[int, Any]) -> None:
    """Prevent `torch.jit.script` from compiling Holdfast's hooks in `hooks`, a table of a module.

    This omits the hooks from the table's `values()`, which `torch.jit.script` and code that moves hooks
    between modules use. A call of the module uses `items()` instead.
    """
    if type(hooks) is OrderedDict:
        given: Any = hooks
        given.values = lambda: [hook for _, hook in _others(hooks)]


def _others(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    return [(number, hook) for number, hook in hooks.items() if not isinstance(hook, Hook)]
