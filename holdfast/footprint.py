"""Tell whether the replicated state is still that of the last commit.

A state that is copied later than at its commit is what the memory holds by then. A script may have swapped
in averaged weights for an evaluation, merged adapters, or moved its weights to look around (SAM), all without
a call that we see. So at each commit a footprint is taken, at the cost of some microseconds: the version
counter of every parameter, where some of them lie, and a few words of their content. Before a state is
believed, and again when it has been copied, the footprint is compared.

Version counters tell of every write by torch's operators, but not of one through `.data`; for that there are
the words: a write that leaves all of them as they were is no swap of weights. On a device the words are not
read, for that would wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_not, ne
from typing import TYPE_CHECKING, Any

from holdfast import capture

if TYPE_CHECKING:
    import torch

SAMPLED = 16  # tensors of each kind (trained, frozen) whose place and content are looked at
RATES = 8  # groups of each optimizer whose learning rate is looked at
WORDS = 32  # in all, at least, if there are fewer tensors

_content = attrgetter("value")


@dataclass(frozen=True, slots=True)
class _Walk:
    """The parameters as they were found, and how to look at a few of them quickly."""

    names: list[str]
    tensors: list[torch.Tensor]
    places: list[int]
    sampled: list[torch.Tensor]
    sampled_places: list[int]
    held: list[torch.Tensor]  # keep the memory that the words are in, whatever becomes of the parameters
    words: list[Any]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the state of `step` looked like when it was committed."""

    step: int
    walk: _Walk
    versions: list[int | None]
    words: list[int]
    plain: list[Any]  # of schedulers and scalers
    rates: list[Any]  # learning rates of optimizers


class Footprints:
    """Takes footprints of the replicated `objects`, and compares them with what is there.

    One thread takes them; others may compare meanwhile.
    """

    def __init__(
        self, objects: Mapping[str, Any], elsewhere: Callable[[torch.Tensor], bool] = lambda _: False
    ) -> None:
        """`elsewhere` says which tensors are a device's."""
        self._objects = objects
        self._elsewhere = elsewhere
        self._plain = {name: value for name, value in objects.items() if _is_plain(value)}
        self._optimizers = [value for value in map(capture.unwrap, objects.values()) if _has_groups(value)]
        self._walk: _Walk | None = None

    def take(self, step: int, walk: bool = False) -> Footprint:
        """Return the footprint of this instant; with `walk`, look for other parameters first."""
        import torch

        known = self._walk
        if known is None or walk or _places(known.sampled) != known.sampled_places:
            with torch.no_grad():
                known = self._walk = _walked(self._objects, self._elsewhere)
        return Footprint(step, known, *_contents(known), self._values(), self._rates())

    def moved(self, since: Footprint) -> str | None:
        """Say what has been written since `since`; None when nothing was."""
        return self.written(since) or self._differs(since)

    def written(self, since: Footprint) -> str | None:
        """Like `moved`, of writes by torch's operators to the parameters of then."""
        versions = capture.versions(since.walk.tensors)
        if versions != since.versions:
            return f"{_first(since.walk.names, versions, since.versions)} was written"
        return None

    def quickly_moved(self, since: Footprint) -> str | None:
        """Like `moved`, for every step, where no parameter was replaced by another object."""
        walk = since.walk
        if (what := self.written(since)) is not None:
            return what
        if _places(walk.sampled) != walk.sampled_places:
            return "parameters were replaced"
        return self._contents_differ(since)

    def plain_moved(self, since: Footprint) -> str | None:
        """Like `moved`, of schedulers and scalers alone: a few microseconds."""
        values = self._values()
        if len(values) != len(since.plain) or any(map(_unlike, values, since.plain)):
            return f"{' or '.join(self._plain)} moved on"
        return None

    def returned(self, since: Footprint) -> Footprint | None:
        """Return a footprint of the present for `since`, if content and places are the same again.

        For weights that were exchanged for others, and back.
        """
        if self._differs(since) is not None:
            return None
        return Footprint(since.step, since.walk, *_contents(since.walk), since.plain, since.rates)

    def late(self, since: Footprint) -> str | None:
        """Like `plain_moved`, and of learning rates: for the end of the work after a commit.

        Not for when a state is copied: many scripts set the rate at the beginning of each step.
        """
        if (what := self.plain_moved(since)) is not None:
            return what
        rates = self._rates()
        if len(rates) != len(since.rates) or any(map(_unlike, rates, since.rates)):
            return "a learning rate was changed"
        return None

    def _differs(self, since: Footprint) -> str | None:
        walk = since.walk
        now = dict(_parameters(self._objects))
        for name, tensor in zip(walk.names, walk.tensors, strict=True):
            if now.pop(name, None) is not tensor:
                return f"{name} was replaced"
        if now:
            return f"{next(iter(now))} was added"
        places = _places(walk.tensors)
        if places != walk.places:
            return f"{_first(walk.names, places, walk.places)} was replaced"
        return self._contents_differ(since)

    def _contents_differ(self, since: Footprint) -> str | None:
        if list(map(_content, since.walk.words)) != since.words:
            return "parameters were written"
        return self.plain_moved(since)

    def _values(self) -> list[Any]:
        """Return what the schedulers and scalers have, and the versions of the tensors among it."""
        found: list[Any] = list(chain.from_iterable(vars(each).values() for each in self._plain.values()))
        return [*found, *map(capture.version, found)]

    def _rates(self) -> list[Any]:
        groups = chain.from_iterable(each.param_groups[:RATES] for each in self._optimizers)
        found = [group.get("lr") for group in groups]
        return [*found, *map(capture.version, found)]


def _contents(walk: _Walk) -> tuple[list[int | None], list[int]]:
    return capture.versions(walk.tensors), list(map(_content, walk.words))


def _places(tensors: list[torch.Tensor]) -> list[int]:
    import torch

    return list(map(torch.Tensor.data_ptr, tensors))


def _first(names: list[str], now: Sequence[int | None], then: Sequence[int | None]) -> str:
    return next(name for name, here, there in zip(names, now, then, strict=True) if here != there)


def _walked(objects: Mapping[str, Any], elsewhere: Callable[[torch.Tensor], bool]) -> _Walk:
    named = list(_parameters(objects))
    tensors = [tensor for _, tensor in named]
    trained, frozen = ([t for t in tensors if t.requires_grad is kind] for kind in (True, False))
    sampled = [*_spread(trained, SAMPLED), *_spread(frozen, SAMPLED)]
    held = [tensor.detach() for tensor in sampled]
    each = max(1, WORDS // max(1, len(sampled)))
    words = [word for tensor in held if not elsewhere(tensor) for word in _words(tensor, each)]
    names = [name for name, _ in named]
    return _Walk(names, tensors, _places(tensors), sampled, _places(sampled), held, words)


def _parameters(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of modules, and those that optimizers alone have."""
    import torch

    seen: set[int] = set()
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, value in objects.items():
        value = capture.unwrap(value)
        if isinstance(value, torch.nn.Module):
            for key, parameter in value.named_parameters():
                seen.add(id(parameter))
                yield f"{name}.{key}", parameter
        elif isinstance(value, torch.optim.Optimizer):
            optimizers[name] = value
    for name, optimizer in optimizers.items():
        for n, own in enumerate(capture.parameters(optimizer)):
            if id(own) not in seen:
                yield f"{name}.param.{n}", own


def _is_plain(value: Any) -> bool:
    import torch

    return isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))


def _has_groups(value: Any) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)


def _unlike(now: Any, then: Any) -> bool:
    """Say whether two values differ; of those that can change within, whether they are two."""
    fixed = (bool, int, float, str, type(None))
    compare: Callable[[Any, Any], bool] = ne if isinstance(now, fixed) and isinstance(then, fixed) else is_not
    return compare(now, then)


def _spread(tensors: list[torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return at most so many of `tensors`, from all over."""
    count = min(most, len(tensors))
    return [tensors[n * len(tensors) // count] for n in range(count)]


def _words(tensor: torch.Tensor, count: int) -> list[Any]:
    """Return `count` words of a tensor's memory, that can be read again and again; none on a device."""
    if tensor.device.type != "cpu" or not capture.fills(tensor.shape, tensor.stride()):
        return []
    kind = ctypes.c_uint64 if tensor.nbytes >= 8 else ctypes.c_uint8
    size = ctypes.sizeof(kind)
    if tensor.nbytes < size:
        return []
    inside = tensor.nbytes // size
    places = sorted({(2 * n + 1) * inside // (2 * count) for n in range(count)})
    return [kind.from_address(tensor.data_ptr() + at * size) for at in places]
