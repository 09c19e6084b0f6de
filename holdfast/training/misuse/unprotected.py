"""Warn of what the script trains or changes without protecting it, because a fault would reset it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.state import advice, capture

if TYPE_CHECKING:
    import torch

_DEPTH = 4  # a search follows this many levels of attributes: a wrapper, a list of schedulers, a scheduler
# These are attributes of bound methods and functools.partial.
_CALL_ATTRIBUTES = ("__self__", "func", "args", "keywords")
_MAX_VISITED = 10_000  # a search visits at most about this many objects


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
        """Warn if the script has added a group that cannot be recreated. A fault would then end the run.

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
                    f" {advice.ADDED_GROUP}"
                )
        self._counts = counts


class UnprotectedSchedulers:
    """Warns when an unprotected scheduler changes a learning rate.

    If a restart restores the optimizer but not its scheduler, the scheduler starts again at its first step
    and sets outdated rates. An optimizer has a scheduler if its groups contain `initial_lr`, which torch's
    schedulers add. The scheduler is considered protected if a protected object refers to the optimizer,
    because that object either is the scheduler or steps it.
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


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    return (p for o in optimizers for group in o.param_groups for p in group["params"])


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

    This includes a reference to another optimizer that shares parameters with it, because one of the two
    wraps the other.
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


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
