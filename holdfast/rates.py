"""Learning rates that a scheduler moves which is not protected: seen when they move.

Where the optimizer is restored and its scheduler is not, the scheduler begins again at its first step and
sets rates of the past. Torch's schedulers leave `initial_lr` in the groups of their optimizer, where they can
be seen. That a protected object knows the optimizer is enough: it is the scheduler, or steps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast import capture

if TYPE_CHECKING:
    import torch

_DEEP = 4  # attributes of attributes: a scheduler in a list of schedulers in a wrapper
_OF_CALLS = ("__self__", "func", "args", "keywords")  # of bound methods and of functools.partial
_MOST = 10_000  # objects of them that are looked at


class Unscheduled:
    """The rates of protected optimizers, until one has moved that no protected object accounts for."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._optimizers, self._objects, self._say = list(optimizers), dict(objects), say
        self._rates = [_rates(each) for each in self._optimizers]

    def look(self) -> None:
        """A step is about to be committed: warn once of each optimizer whose rates a scheduler moves."""
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
                    "resume it begins again at its first step, and trains with the wrong rate. Protect it as "
                    "well: state = session.protect(..., scheduler=scheduler)"
                )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what differs when a rate has changed. A tensor is not read: it may be on a device."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        written = capture.version(rate)
        found += (rate,) if written is None else (id(rate), written)
    return found


def _is_known(optimizer: torch.optim.Optimizer, objects: Any) -> bool:
    """Say whether one of `objects` that is no optimizer leads to `optimizer`, or to what it wraps."""
    import torch

    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [each for each in objects if not isinstance(each, (torch.optim.Optimizer, torch.nn.Module))]
    found = (each for each in _reached(others) if isinstance(each, torch.optim.Optimizer))
    return any(not mine.isdisjoint(id(p) for g in each.param_groups for p in g["params"]) for each in found)


def _reached(values: list[Any]) -> Iterator[Any]:
    """Yield what `values` lead to: through attributes, lists and dicts, but not into modules and tensors."""
    import torch

    seen: set[int] = set()
    for _ in range(2 * _DEEP + 1):  # the attributes of an object are a dict
        further: list[Any] = []
        for value in values:
            if id(value) in seen or len(seen) > _MOST:
                continue
            seen.add(id(value))
            yield value
            if isinstance(value, (str, bytes, int, float, type, torch.Tensor, torch.nn.Module)):
                continue
            if isinstance(value, torch.optim.Optimizer):
                continue
            if isinstance(value, dict):
                further += value.values()
            elif isinstance(value, (list, tuple, set, frozenset)):
                further += value
            else:
                further += getattr(value, "__dict__", {}).values()
                slots = getattr(type(value), "__slots__", ())
                names = (slots,) if isinstance(slots, str) else slots
                further += (found for n in names if (found := getattr(value, n, None)) is not None)
                further += (getattr(value, n, None) for n in _OF_CALLS)
                further += map(_content, getattr(value, "__closure__", None) or ())
        values = further
