"""Detect mistakes in a script's use of the API, such as calling `steps` and `commit` out of order.

Without these checks, such a mistake would silently count a step that was not trained, or train a step without
counting it. So it raises an exception, whose message says what to do instead. A call that is only likely to
be a mistake causes a single warning.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import BadInput, Uncommitted, type_with_article
from holdfast.state import capture
from holdfast.state.device import Device, PendingNumbers
from holdfast.state.random_state import is_generator_state

if TYPE_CHECKING:
    from types import FrameType

    import torch
    from torch.utils.hooks import RemovableHandle

_TRAINING = str(Path(__file__).parents[1] / "training") + os.sep

_R = TypeVar("_R")
WATCHED = 4  # the number of gradients to watch; one call of `Device.bring` can copy this many numbers
# A script may begin the same step this often, because it is not a mistake to skip a bad batch by `continue`.
TRIES = 3


class ScriptPosition(Enum):
    """The script's position relative to the loop over `state.steps()`."""

    OUTSIDE = "outside a loop over state.steps()"
    IN_STEP = "in a step"
    COMMITTED = "after the commit of a step"


class CallOrder:
    """Tracks the script's position, and refuses calls that are out of order.

    A call that is refused raises `BadInput` (or its subclass `Uncommitted`) and changes nothing.
    """

    def __init__(self) -> None:
        self.place = ScriptPosition.OUTSIDE
        self._step = -1
        self._begun = 0

    def enter(self) -> None:
        """Record that a loop is starting. Raises BadInput if it is inside another loop."""
        if self.place is not ScriptPosition.OUTSIDE:
            raise BadInput(
                f"steps() {self.place.value} {self._step}: one loop over state.steps() cannot be inside "
                "another. For epochs, loop over steps((epoch + 1) * steps_per_epoch) in each epoch"
            )
        self.place = ScriptPosition.COMMITTED
        self._begun = 0

    def begin(self, step: int) -> None:
        """Record that the loop is about to yield `step`.

        Raises Uncommitted if the step has already begun `TRIES` times without a commit.
        """
        again = step == self._step and self.place is ScriptPosition.IN_STEP
        begun = self._begun + 1 if again else 1
        if begun > TRIES:
            raise Uncommitted(
                f"step {step} began {TRIES} times without a commit: call state.commit(loss=...) at the "
                "end of each step, and do not catch exceptions that torch.distributed raises in it. To skip "
                "batches that produce bad numbers, use --skip-bad-batches"
            )
        self.place, self._step, self._begun = ScriptPosition.IN_STEP, step, begun

    def commit(self) -> None:
        """Check that the script may commit now. Raises BadInput outside a step and after its commit."""
        if self.place is ScriptPosition.OUTSIDE:
            raise BadInput(
                "commit() outside a step: call it once in each step of `for step in state.steps(n):`, "
                "not before or after that loop"
            )
        if self.place is ScriptPosition.COMMITTED:
            raise BadInput(
                f"commit() was already called in step {self._step}: call it once in each step, after the "
                "optimizer's step()"
            )

    def write(self) -> None:
        """Check that an optimizer may change the parameters now. Raises BadInput after the step's commit."""
        if self.place is ScriptPosition.COMMITTED:
            raise BadInput(
                f"optimizer.step() was called after commit() in step {self._step}: call commit() after it"
            )

    def committed(self) -> None:
        """Record that the step is committed."""
        self.place = ScriptPosition.COMMITTED

    def leave(self) -> None:
        """Record that the loop has ended: normally, by `break`, or by an exception."""
        self.place = ScriptPosition.OUTSIDE


def step_count(value: Any) -> int:
    """Return the number of steps that `steps(value)` requests.

    Raises BadInput unless `value` is an integer that is not negative.
    """
    wrong = f"steps({value!r}): expected the number of steps of the whole training, such as steps(1000)"
    try:
        count = operator.index(value)
    except TypeError:
        raise BadInput(wrong) from None
    if count < 0:
        raise BadInput(wrong)
    return count


def require_names(call: str, given: tuple[Any, ...]) -> None:
    """Raise BadInput if `given`, the positional arguments of a `call` that accepts none, is not empty."""
    if given:
        kinds = ", ".join(type(each).__name__ for each in given)
        raise BadInput(f"{call.partition('(')[0]}() was given {kinds} without a name: write {call}")


def require_known(call: str, unknown: Iterable[str]) -> None:
    """Raise BadInput if `unknown`, the names of arguments that `call` does not accept, is not empty."""
    names = ", ".join(unknown)
    if names:
        raise BadInput(f"{call.partition('(')[0]}() has no argument {names}: write {call}")


def require_scalar(name: str, value: Any) -> None:
    """Raise BadInput unless `value` is None, a number or a one-element tensor. Does not read the tensor."""
    if value is None or isinstance(value, (int, float)):
        return
    if hasattr(value, "numel"):
        if (count := value.numel()) != 1:
            right = f"pass one number, such as {name}.mean()"
            raise BadInput(f"commit({name}=...): got a tensor with {count} elements; {right}")
    elif not hasattr(value, "item") and not hasattr(value, "__float__"):
        raise BadInput(f"commit({name}={value!r}): expected a number or a tensor with one element")


def require_counts(**values: Any) -> None:
    """Raise BadInput unless each value is a whole number; `flops` may be any number."""
    for name, value in values.items():
        fractional = name == "flops" and hasattr(value, "__float__")
        if not fractional and not hasattr(value, "__index__"):
            expected = "a number" if name == "flops" else "a whole number"
            raise BadInput(f"commit({name}={value!r}): expected {expected}")


def check_pause(label: Any, limit_s: Any) -> None:
    """Raise BadInput unless `label` is a string and `limit_s` is a number of seconds, at least 0."""
    if not isinstance(label, str):
        raise BadInput(f'pause({label!r}): expected a label first, as in state.pause("eval", limit_s=600)')
    if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not limit_s >= 0:
        raise BadInput(f"pause(limit_s={limit_s!r}): expected seconds, or 0 for the run's --pause-timeout")


class Pause:
    """The result of `state.pause`. It can be used as a context manager or as a decorator of functions.

    A pause that is used in neither way has no effect. When it is garbage-collected, it calls `unused` with a
    warning that names the line of the `state.pause` call. Decorating an `async def` or a generator function
    raises `BadInput`: the body of such a function runs after the call has returned, when the pause would
    already be over.
    """

    def __init__(
        self, label: Any, begin: Callable[[], AbstractContextManager[None]], unused: Callable[[str], None]
    ) -> None:
        caller = sys._getframe(2)  # the frame that called `state.pause`
        self._place = caller.f_code.co_filename.rpartition("/")[2], caller.f_lineno
        self._label, self._begin, self._unused = label, begin, unused
        self._open: list[AbstractContextManager[None]] = []
        self._used = False

    def __enter__(self) -> None:
        self._used = True
        pause = self._begin()
        pause.__enter__()
        self._open.append(pause)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._open.pop().__exit__(*raised)

    def __call__(self, function: Callable[..., _R]) -> Callable[..., _R]:
        self._used = True
        if kind := _deferred_kind(function):
            call, name = f"state.pause({self._label!r})", getattr(function, "__name__", repr(function))
            raise BadInput(
                f"{call} decorates {name}, which is {kind}: its body runs after the call has returned, when"
                f" the pause is already over. Write `with {call}:` around the work instead"
            )

        @wraps(function)
        def paused(*args: Any, **kwargs: Any) -> _R:
            with self._begin():
                return function(*args, **kwargs)

        return paused

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            name, line = self._place
            call = f"state.pause({self._label!r})"
            self._unused(f"{call} has no effect without `with` ({name}, line {line}): write `with {call}:`")


def _deferred_kind(function: Callable[..., object]) -> str:
    """Return the kind of `function` if its body runs after its call has returned; otherwise "".

    The kind is a phrase for a message.
    """
    if inspect.iscoroutinefunction(function):
        return "an async function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "a generator function"
    return ""


def unkeepable_advice(name: str, value: Any) -> str:
    """Return a message that says what to pass to `protect` instead of `value`, which it cannot protect."""
    name_of = type(value).__name__
    if name_of in ("DistributedSampler", "DataLoader"):
        return (
            f"protect({name}=...): a {name_of} does not record its position in the data: use "
            "holdfast.Batches(dataset, batch_size, session, state), which begins at state.step "
            '(see "Epochs and DataLoader" in the user guide), and do not protect it'
        )
    return (
        f"protect({name}=...): the type {name_of} has no state_dict or no load_state_dict: "
        "pass a module, an optimizer, a scheduler, or an object that has both"
    )


def shared_generator_advice(name: str) -> str:
    """Return a warning about the object `name`, whose state contains both tensors and a generator's state.

    Holdfast assumes that such an object is the same on all ranks. This is wrong if each rank has its own
    generator.
    """
    return (
        f"{name} has the state of a torch.Generator as well as tensors, so Holdfast assumes that it is the"
        " same on all ranks, and a restart copies one rank's state to all. If each rank has its own"
        " generator, set holdfast_private = True on it and make state_dict() return .tolist() of the"
        " tensors; otherwise, set holdfast_private = False"
    )


def frozen_advice(names: list[str], step: int) -> str:
    """Return a warning about parameters that are frozen now but were not at `step`, where the run resumes."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more}: requires_grad was True at step {step}, but the script set it to False when it"
        " started. It stays False, because DDP does not reduce gradients of parameters that were frozen"
        " when DDP was constructed. Set it to True before DDP is constructed, under `if state.step >= N:`,"
        " where N is the step of the change"
    )


def not_json_advice(states: Mapping[str, Any]) -> str:
    """Return a message that names the first value in `states` that JSON cannot represent."""
    for name, state in states.items():
        found = _first_not_json(state, name)
        if found is not None:
            path, value = found
            return (
                f"{path} is {type_with_article(value)}: state that is private to a rank must be JSON "
                "(numbers, strings, lists, dicts). Make state_dict() return a list, or None, instead"
            )
    return "state that is private to a rank must be JSON"


def _first_not_json(value: Any, path: str) -> tuple[str, Any] | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, Mapping):
        bad = next((key for key in value if not isinstance(key, (str, int, float, bool, type(None)))), None)
        if bad is not None:
            return f"{path}: the key {bad!r}", bad
        below = (_first_not_json(each, f"{path}[{key!r}]") for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        below = (_first_not_json(each, f"{path}[{at}]") for at, each in enumerate(value))
    else:
        return None if is_generator_state(value) else (path, value)
    return next((each for each in below if each is not None), None)


ADDED_GROUP_ADVICE = (
    "a group that is added during the run can be recreated only if all its parameters belong to a"
    " protected module and require a gradient when protect is called. Add all groups before protect, with"
    " lr=0 until they are trained"
)


class AddedGroups:
    """Warns of parameter groups that the script adds during the run and that a restart cannot recreate."""

    def __init__(
        self, modules: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer], say: Callable[[str], None]
    ) -> None:
        self._optimizers = list(optimizers)
        self._say = say
        self._trained = {id(p) for module in modules for p in module.parameters() if p.requires_grad}
        self._counts = [len(each.param_groups) for each in self._optimizers]

    def check(self, step: int) -> None:
        """Warn if the script has added a group that cannot be recreated, so that a fault would end the run.

        Each added group causes at most one warning.
        """
        counts = [len(each.param_groups) for each in self._optimizers]
        if counts == self._counts:
            return
        for optimizer, before in zip(self._optimizers, self._counts, strict=True):
            new = [p for group in optimizer.param_groups[before:] for p in group["params"]]
            if not all(id(p) in self._trained for p in new):
                kind = type(optimizer).__name__
                self._say(
                    f"{kind} has a new parameter group at step {step}, so a fault would end the run:"
                    f" {ADDED_GROUP_ADVICE}"
                )
        self._counts = counts


class UnprotectedTraining:
    """Warns of unprotected optimizers that step and unprotected parameters that are trained.

    A global torch hook watches the first step of each optimizer. `finish` removes it at the first commit.
    """

    def __init__(self, modules: Iterable[Any], optimizers: Iterable[Any], say: Callable[[str], None]) -> None:
        from torch.optim import optimizer

        self._modules, self._optimizers = list(modules), list(optimizers)
        self._say = say
        self._found: dict[str, None] = {}
        self._seen: set[int] = set()
        self._hook = optimizer.register_optimizer_step_pre_hook(self._before)

    def finish(self) -> bool:
        """After the first step, remove the hook and issue the warnings. Return whether there were any."""
        self._hook.remove()
        for text in self._found:
            self._say(text)
        return bool(self._found)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        kind = type(optimizer).__name__
        mine = {id(p) for p in _parameters([optimizer])}
        known = any(optimizer is each for each in self._optimizers)
        within = mine <= {id(p) for p in _parameters(self._optimizers)}  # a protected optimizer wraps it
        if not known and not within:
            text = f"{kind} steps but is not protected, so a fault resets it: protect(..., optimizer=...)"
            self._found[text] = None
        held = [p for module in self._modules for p in module.parameters()]
        if mine & {id(p) for p in held} or any(p.grad is not None for p in held):
            return
        what = "which belong to no protected module, and no protected parameter has a gradient"
        self._found[
            f"{kind} trains {len(mine)} parameters, {what}, so a fault resets them: protect(model=...) "
            "with the model that is trained"
        ] = None


class AccumulatedGradients:
    """Warns of gradients that the script accumulates across a commit, because snapshots do not contain them.

    A commit without an optimizer step is not a mistake in itself: a gradient scaler may have skipped the
    step, or the step may only evaluate. After such a commit, this class watches a few gradients until the
    next backward pass reaches them. If a gradient is then unchanged and not zero, the backward pass is about
    to add to it.
    """

    def __init__(self, modules: Iterable[Any], device: Device, say: Callable[[str], None]) -> None:
        self._modules, self._device, self._say = list(modules), device, say
        self._hooks: list[RemovableHandle] = []
        # On a device, the number of nonzero elements of each gradient.
        self._brought: PendingNumbers | None = None
        self._added = self._warned = False

    def watch(self) -> None:
        """Start watching a few gradients, because no optimizer has stepped in the step being committed."""
        found = [] if self._warned else list(islice(self._candidates(), WATCHED))
        for parameter, grad in found:
            same = grad.data_ptr(), capture.version(grad)
            self._hooks.append(parameter.register_hook(partial(self._before, parameter, same)))
        if found and self._device.queues:
            counts = [(grad.detach() != 0).sum() for _, grad in found]
            self._brought = self._device.bring(counts)

    def check(self) -> None:
        """At the commit of the next step, warn once if that step has added to a watched gradient."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        brought, self._brought = self._brought, None
        if not self._added:
            return
        self._added = False
        if brought is not None:
            self._device.wait(brought.mark)
            if not any(brought.values()):
                return
        self._warned = True
        commit = _caller_of_commit()
        name, line = commit.f_code.co_filename.rpartition("/")[2], commit.f_lineno
        self._say(
            f"gradients are accumulated across commit() ({name}, line {line}), which does not save "
            "them: a fault between two optimizer steps loses the gradients since the last optimizer step, "
            "and the weights differ from then on. Call optimizer.step() once per step: loop over the "
            "micro-batches within the step, and call commit() once, after it "
            '(see "Gradient accumulation" in the user guide)'
        )

    def _before(self, parameter: torch.Tensor, same: tuple[int, int | None], _: torch.Tensor) -> None:
        """Record whether the backward pass is about to add to `parameter.grad` instead of replacing it."""
        grad = parameter.grad
        if grad is None or (grad.data_ptr(), capture.version(grad)) != same:
            return  # the script has cleared or replaced the gradient since the commit
        self._added = self._added or self._device.queues or bool(grad.detach().any())

    def _candidates(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parameters and their gradients, roughly in the order of backward passes."""
        for module in reversed(self._modules):
            for parameter in reversed(list(module.parameters())):
                grad = parameter.grad
                if not parameter.requires_grad or grad is None or grad.is_sparse:
                    continue
                if self._device.holds(grad) if self._device.queues else grad.device.type == "cpu":
                    yield parameter, grad


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    return (p for o in optimizers for group in o.param_groups for p in group["params"])


def warn(rank: int, text: str) -> None:
    """Print a warning if this is rank 0. The other ranks would print the same warning."""
    if rank == 0:
        with suppress(ValueError, OSError):  # the script may have closed stderr
            print(f"holdfast: warning: {text}", file=sys.stderr, flush=True)


_DEPTH = 4  # a search follows this many levels of attributes: a wrapper, a list of schedulers, a scheduler
# These are attributes of bound methods and functools.partial.
_CALL_ATTRIBUTES = ("__self__", "func", "args", "keywords")
_MAX_VISITED = 10_000  # a search visits at most about this many objects


def _caller_of_commit() -> FrameType:
    """Return the frame that called `state.commit`: the innermost frame outside `holdfast.training`."""
    frame = sys._getframe(2)  # the caller of the check, within `commit`
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TRAINING):
        frame = frame.f_back
    return frame


class UnprotectedSchedulers:
    """Warns when an unprotected scheduler changes a learning rate.

    If a restart restores the optimizer but not its scheduler, the scheduler starts again at its first step
    and sets outdated rates. An optimizer has a scheduler if its groups contain `initial_lr`, which torch's
    schedulers add. The scheduler counts as protected if a protected object refers to the optimizer, because
    that object either is the scheduler or steps it.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._optimizers, self._objects, self._say = list(optimizers), dict(objects), say
        self._rates = [_rates(each) for each in self._optimizers]

    def check(self) -> None:
        """At a commit, warn of each optimizer whose rates an unprotected scheduler has changed.

        Each optimizer causes at most one warning.
        """
        for at in reversed(range(len(self._optimizers))):
            optimizer = self._optimizers[at]
            if _rates(optimizer) == self._rates[at]:
                continue
            del self._optimizers[at], self._rates[at]
            scheduled = any("initial_lr" in group for group in optimizer.param_groups)
            if scheduled and not _is_known(optimizer, self._objects.values()):
                kind = type(optimizer).__name__
                self._say(
                    f"a scheduler sets the learning rate of {kind} and is not protected: after a fault or a "
                    "resume, it starts again at its first step and sets the wrong rate. Protect it as well: "
                    "state = session.protect(..., scheduler=scheduler)"
                )


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return a list that is different from earlier results if a learning rate has changed.

    A tensor is represented by its identity and version. Its value is not read, because it may be on a device.
    """
    found: list[Any] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        written = capture.version(rate)
        found += (rate,) if written is None else (id(rate), written)
    return found


def _is_known(optimizer: torch.optim.Optimizer, objects: Any) -> bool:
    """Return whether one of `objects` that is neither an optimizer nor a module refers to `optimizer`.

    A reference to another optimizer that shares parameters with it counts too, because one of the two wraps
    the other.
    """
    import torch

    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [each for each in objects if not isinstance(each, (torch.optim.Optimizer, torch.nn.Module))]
    found = (each for each in _reached(others) if isinstance(each, torch.optim.Optimizer))
    return any(not mine.isdisjoint(id(p) for g in each.param_groups for p in g["params"]) for each in found)


def _reached(values: list[Any]) -> Iterator[Any]:
    """Yield `values`, and the objects that they refer to directly or through attributes and containers.

    The search does not descend into modules, optimizers or tensors.
    """
    seen: set[int] = set()
    for _ in range(2 * _DEPTH + 1):  # one level can take two rounds: an attribute, and a container's items
        further: list[Any] = []
        for value in values:
            if id(value) in seen or len(seen) > _MAX_VISITED:
                continue
            seen.add(id(value))
            yield value
            further += _referred_by(value)
        values = further


def _referred_by(value: Any) -> Iterator[Any]:
    """Yield the objects that `value` refers to directly; none if it is plain, a module or a tensor."""
    import torch

    ends = (str, bytes, int, float, type, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    if isinstance(value, ends):
        return
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
        slots = getattr(type(value), "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (found for n in names if (found := getattr(value, n, None)) is not None)
        yield from (getattr(value, n, None) for n in _CALL_ATTRIBUTES)
        yield from map(_cell_content, getattr(value, "__closure__", None) or ())
