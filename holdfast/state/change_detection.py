"""Tell whether the replicated state is still that of the last commit.

A state that is copied later than at its commit is what the memory holds by then. A script may have swapped
in averaged weights for an evaluation, merged adapters, or moved its weights to look around (SAM), all without
a call that we see. So at each commit a footprint is taken, at the cost of some microseconds: the version
counter of every parameter and of every tensor that an optimizer keeps for one, where some of them lie, a few
words of their content, the options of the optimizers, and what other objects show in their state_dict. Before
a state is believed, and again when it has been copied, the footprint is compared.

Version counters tell of every write by torch's operators, but not of one through `.data`; for that there are
the words: a write that leaves all of them as they were is no swap of weights. On a device the words are not
read, for that would wait for it.

An object whose state_dict gives copies of its tensors shows no write: `ChangeDetector.unseen` names it. One
that can be iterated over is data, which may be drawn ahead, and is not looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, is_not, methodcaller, ne
from typing import TYPE_CHECKING, Any, TypeGuard

from holdfast.state import capture

if TYPE_CHECKING:
    import torch

SAMPLED = 16  # tensors of each kind (trained, frozen) whose place and content are looked at
FEW = 32  # tensors of an object whose state_dict makes others for them in each call: it takes time for each
WORDS = 32  # in all, at least, if there are fewer tensors

_content = attrgetter("value")
_values, _flat = methodcaller("values"), chain.from_iterable
_FIXED = (bool, int, float, str, type(None))  # nothing changes within


@dataclass(frozen=True, slots=True)
class _Walk:
    """Parameters and optimizers' tensors as they were found, and how to look at a few of them quickly."""

    names: list[str]
    tensors: list[torch.Tensor]
    places: list[int]
    sampled: list[torch.Tensor]
    sampled_places: list[int]
    held: list[torch.Tensor]  # keep the memory that the words are in, whatever becomes of the parameters
    words: list[Any]
    kept: list[tuple[torch.optim.Optimizer, torch.Tensor]]  # parameters whose states are looked at
    lists: list[torch.Tensor]  # of objects with more tensors than `FEW`: they share their version counters
    called: dict[str, Any]  # objects whose state_dict is looked at


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the state of `step` looked like when it was committed."""

    step: int
    walk: _Walk
    versions: list[int | None]
    words: list[int]
    plain: list[Any]  # of schedulers and scalers
    options: list[Any]  # of the optimizers' groups
    states: _States
    shown: dict[str, list[Any]]  # by other objects


@dataclass(frozen=True, slots=True)
class _States:
    """What some parameters have in their optimizers' states."""

    counts: list[int]  # of parameters with a state
    tensors: list[int]  # which they are
    rest: list[Any]  # their versions, and what is no tensor


class ChangeDetector:
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
        self._others = {name: value for name, value in objects.items() if _is_other(value)}
        self._walk: _Walk | None = None
        self._walked_states: _States | None = None  # as they were then
        self._replaced = -1  # the last step that put other tensors into an optimizer's state
        self._loose = False  # each step does: those that it leaves behind shall not be held
        self.unseen: list[str] = []  # objects in which no write can be seen

    def take(self, step: int, walk: bool = False) -> Footprint:
        """Return the footprint of this instant; with `walk`, look for other parameters first."""
        import torch

        known = self._walk
        states = None if known is None or walk else self._states(known)
        if known is not None and states is not None:
            walk = _places(known.sampled) != known.sampled_places or self._outgrown(states, step)
        if known is None or states is None or walk:
            with torch.no_grad():
                known = self._walk = self._walk_all()
            states = self._walked_states = self._states(known)
        shown = _shown(known.called)
        return Footprint(step, known, *_contents(known), self._values(), self._options(), states, shown)

    def _outgrown(self, now: _States, step: int) -> bool:
        """Say whether the optimizers keep other tensors than when they were walked."""
        then = self._walked_states
        if then is None or self._loose or (now.counts, now.tensors) == (then.counts, then.tensors):
            return False
        if now.counts == then.counts:
            self._loose = self._replaced == step - 1
            self._replaced = step
        return True

    def moved(self, since: Footprint) -> str | None:
        """Say what has been written since `since`; None when nothing was."""
        return self.written(since) or self._differs(since)

    def written(self, since: Footprint) -> str | None:
        """Like `moved`, of writes by torch's operators to the parameters of then."""
        walk = since.walk
        versions = _versions(walk)
        if versions != since.versions:
            return f"{_first(walk.names, versions, since.versions)} was written"
        if self._states(walk) != since.states:
            return "an optimizer's state was written"
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
        """Like `moved`, of what is neither module nor optimizer: a few microseconds."""
        values = self._values()
        if len(values) != len(since.plain) or any(map(_unlike, values, since.plain)):
            return f"{' or '.join(self._plain)} moved on"
        shown = _shown(since.walk.called)
        return next((f"{name} moved on" for name, was in since.shown.items() if shown[name] != was), None)

    def returned(self, since: Footprint) -> Footprint | None:
        """Return a footprint of the present for `since`, if content and places are the same again.

        For weights that were exchanged for others, and back.
        """
        if self._differs(since) is not None:
            return None
        contents, states = _contents(since.walk), self._states(since.walk)
        return Footprint(since.step, since.walk, *contents, since.plain, since.options, states, since.shown)

    def late(self, since: Footprint) -> str | None:
        """Like `plain_moved`, and of the optimizers' options: for the end of the work after a commit.

        Not for when a state is copied: many scripts set the rate at the beginning of each step.
        """
        if (what := self.plain_moved(since)) is not None:
            return what
        return "a learning rate or another option of an optimizer was changed" if self._set(since) else None

    def _set(self, since: Footprint) -> bool:
        now, then = self._options(), since.options
        try:
            return now != then  # identical ones are not compared with each other
        except RuntimeError:  # other tensors
            return len(now) != len(then) or any(map(_unlike, now, then))

    def _differs(self, since: Footprint) -> str | None:
        walk = since.walk
        now = dict(self._tensors())
        for name, tensor in zip(walk.names, walk.tensors, strict=False):  # those of `lists` follow
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
        found: list[Any] = list(chain.from_iterable(map(_held, self._plain.values())))
        return [*found, *map(capture.version, found)]

    def _options(self) -> list[Any]:
        """Return what the optimizers' groups have, and the versions of learning rates that are tensors."""
        groups = [group for each in self._optimizers for group in each.param_groups]
        rates = [group.get("lr") for group in groups]
        return [*_flat(map(_values, groups)), *map(capture.version, rates)]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is looked at in modules and optimizers, by name."""
        yield from _parameters(self._objects)
        if not self._loose:
            yield from _kept_by_optimizers(self._objects)

    def _walk_all(self) -> _Walk:
        parameters = [tensor for _, tensor in _parameters(self._objects)]
        named = list(self._tensors())
        trained, frozen = ([t for t in parameters if t.requires_grad is kind] for kind in (True, False))
        kept = [
            (each, own)
            for top in self._optimizers
            for each in (top, *capture.wrapped_optimizers(top).values())
            for own in _spread([p for p, has in each.state.items() if _is_tensor(p) and has], SAMPLED)
        ]
        sampled = [*_spread(trained, SAMPLED), *_spread(frozen, SAMPLED)]
        others = [] if self._loose else _spread([t for _, t in named[len(parameters) :]], SAMPLED)
        held = [tensor.detach() for tensor in (*sampled, *others)]
        each_has = max(1, WORDS // max(1, len(held)))
        words = [word for tensor in held if not self._elsewhere(tensor) for word in _words(tensor, each_has)]
        names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
        lists, called = self._look_at_others(names)
        places = _places(tensors)
        return _Walk(names, tensors, places, sampled, _places(sampled), held, words, kept, lists, called)

    def _look_at_others(self, names: list[str]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Find out how each object that is neither of torch's shows its state. Adds to `names`."""
        lists: list[torch.Tensor] = []
        called: dict[str, Any] = {}
        self.unseen = []
        for name, value in self._others.items():
            first, second = list(_leaves(value.state_dict())), list(_leaves(value.state_dict()))
            ours, theirs = ([t for t in each if _is_tensor(t)] for each in (first, second))
            if _places(ours) != _places(theirs):
                self.unseen.append(name)
            elif len(ours) <= FEW or all(map(is_, ours, theirs)):
                called[name] = value
            else:
                lists += ours
                names += [name] * len(ours)
        return lists, called

    def _states(self, walk: _Walk) -> _States:
        """Return what some of the parameters have in their optimizers' states: a few microseconds."""
        import torch

        found = list(_flat(optimizer.state.get(own, {}).values() for optimizer, own in walk.kept))
        tensor, plain = torch.Tensor, _FIXED
        tensors = [each for each in found if isinstance(each, tensor)]
        rest = [each for each in found if type(each) in plain]
        counts = [len(each.state) for each in self._optimizers]
        return _States(counts, list(map(id, tensors)), [*capture.versions(tensors), *rest])


def _contents(walk: _Walk) -> tuple[list[int | None], list[int]]:
    return _versions(walk), list(map(_content, walk.words))


def _versions(walk: _Walk) -> list[int | None]:
    return capture.versions([*walk.tensors, *walk.lists] if walk.lists else walk.tensors)


def _places(tensors: list[torch.Tensor]) -> list[int]:
    import torch

    return list(map(torch.Tensor.data_ptr, tensors))


def _first(names: list[str], now: Sequence[int | None], then: Sequence[int | None]) -> str:
    return next(name for name, here, there in zip(names, now, then, strict=False) if here != there)


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


def _kept_by_optimizers(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that optimizers keep for their parameters, and the counts of averages."""
    import torch

    for name, value in objects.items():
        value = capture.unwrap(value)
        if isinstance(value, torch.nn.Module):
            yield from capture.average_counts(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            for optimizer in (value, *capture.wrapped_optimizers(value).values()):
                yield from _state_tensors(name, optimizer)


def _state_tensors(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the states of the parameters of one optimizer, which `name` leads to."""
    for n, parameter in enumerate(capture.parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_tensor(value):
                yield f"{name}.state.{n}.{key}", value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and plain values of an object's state."""
    if _is_tensor(value) or isinstance(value, _FIXED):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)


def _shown(objects: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what the objects show: plain values, and where each tensor is and how often it was written."""
    return {name: list(map(_seen, _leaves(value.state_dict()))) for name, value in objects.items()}


def _seen(leaf: Any) -> Any:
    return (leaf.data_ptr(), *capture.versions([leaf])) if _is_tensor(leaf) else leaf


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    import torch

    return isinstance(value, torch.Tensor)


def _is_other(value: Any) -> bool:
    """Say whether `value` is an object of the script's own that is no data."""
    import torch

    ours = (torch.nn.Module, torch.optim.Optimizer)
    data = any(hasattr(type(value), each) for each in ("__iter__", "__next__"))
    return not (data or isinstance(capture.unwrap(value), ours) or _is_plain(value))


def _is_plain(value: Any) -> bool:
    import torch

    return isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))


def _held(value: Any) -> list[Any]:
    """Return what a scheduler or a scaler has; None in the place of what the first `scale()` only made."""
    import torch

    held = vars(value)
    if not isinstance(value, torch.amp.GradScaler):
        return list(held.values())
    made = {name: held.get(f"_init{name}") for name in ("_scale", "_growth_tracker")}
    return [None if name in made and _is_just(each, made[name]) else each for name, each in held.items()]


def _is_just(value: Any, initial: Any) -> bool:
    """Say whether a tensor was filled with `initial` when it was made, and not written since.

    On a device only the latter is looked at: to read it would wait for the device.
    """
    if not _is_tensor(value) or capture.version(value):
        return False
    return value.device.type != "cpu" or bool(value == initial)


def _has_groups(value: Any) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)


def _unlike(now: Any, then: Any) -> bool:
    """Say whether two values differ; of those that can change within, whether they are two."""
    plain = isinstance(now, _FIXED) and isinstance(then, _FIXED)
    compare: Callable[[Any, Any], bool] = ne if plain else is_not
    return compare(now, then)


def _spread(tensors: list[torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return at most so many of `tensors`, from all over."""
    count = min(most, len(tensors))
    return [tensors[n * len(tensors) // count] for n in range(count)]


def _words(tensor: torch.Tensor, count: int) -> list[Any]:
    """Return `count` words of a tensor's memory, that can be read again and again; none on a device."""
    if tensor.device.type != "cpu" or not capture.is_dense(tensor.shape, tensor.stride()):
        return []
    kind = ctypes.c_uint64 if tensor.nbytes >= 8 else ctypes.c_uint8
    size = ctypes.sizeof(kind)
    if tensor.nbytes < size:
        return []
    inside = tensor.nbytes // size
    places = sorted({(2 * n + 1) * inside // (2 * count) for n in range(count)})
    return [kind.from_address(tensor.data_ptr() + at * size) for at in places]
