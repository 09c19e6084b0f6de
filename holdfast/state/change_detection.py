"""Detect whether the replicated state has changed since the last commit.

A copy that is made after the commit contains what is in memory at that moment. Since the commit, a script may
have swapped in averaged weights for an evaluation, merged adapters, or moved the weights temporarily (SAM),
all without calling Holdfast. So each commit takes a footprint of the state, at a cost of a few microseconds.
The state is compared with the footprint before and after each copy. The footprint consists of:

- the version counters of all parameters and all tensors in the optimizers' states;
- the addresses of all trained parameters and of some other tensors, and a few words of the content of some;
- the options of the optimizers;
- the state_dict of other objects.

A version counter counts every write by torch's operators, but not writes through `.data`. The words of
content reveal such writes: swapping the weights would change at least one of them. Words on a device are not
read, because reading them would mean waiting for the device.

Writes to an object whose state_dict returns copies of its tensors cannot be detected. Such objects are listed
in `ChangeDetector.unseen`. Iterable objects are ignored, because they are data that the script may load in
advance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, is_not, methodcaller, ne
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

from holdfast.state import capture
from holdfast.state.torch_hooks import is_optimizer

if TYPE_CHECKING:
    import torch

SAMPLED = 16  # the number of tensors of each kind (trained, frozen) whose content is compared
FEW = 32  # a state_dict that creates more tensor objects than this is not called for each comparison
WORDS = 32  # at least this many words are compared, if the sampled tensors are large enough

_T = TypeVar("_T")
_content = attrgetter("value")
_values, _flat = methodcaller("values"), chain.from_iterable
_FIXED = (bool, int, float, str, type(None))  # immutable types


@dataclass(frozen=True, slots=True)
class _Walk:
    """The tensors that one walk over modules and optimizers found, and a sample that is fast to compare."""

    names: list[str]
    tensors: list[torch.Tensor]
    places: list[int]
    watched: list[torch.Tensor]  # each commit compares their addresses: all trained ones, some frozen ones
    watched_places: list[int]
    held: list[torch.Tensor]  # keeps the memory of `words` alive
    words: list[Any]
    # The optimizers, and which of the states in each optimizer's table are compared. A lookup by parameter
    # would hash the parameter, for which torch calls a Python function.
    kept: list[tuple[torch.optim.Optimizer, tuple[int, ...]]]
    has_states: bool  # whether `tensors` includes the tensors in these states
    lists: list[torch.Tensor]  # tensors of objects with more than `FEW` tensors; only versions are compared
    called: dict[str, Any]  # objects whose state_dict is called for each comparison
    form: _Form | None  # where the walk found the tensors; None if only another walk can find them again


@dataclass(frozen=True, slots=True)
class _Form:
    """The modules and optimizers of one walk, and what they held.

    `objects` are compared by identity, which takes a tenth of the time of a walk.
    """

    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    averages: list[torch.nn.Module]
    with_states: bool
    names: list[str]
    objects: list[Any]
    marks: list[bool]


class Footprint(NamedTuple):  # made in each step; a frozen dataclass takes several times as long
    """The properties of the state of `step` that were recorded at its commit."""

    step: int
    walk: _Walk
    versions: list[int | None]
    words: list[int]
    plain: list[Any]  # the attributes of schedulers and scalers
    options: list[Any]  # the values in the optimizers' groups
    states: _States
    shown: dict[str, list[Any]]  # the content of each other object's state_dict


class _States(NamedTuple):
    """The optimizers' states for some of the parameters."""

    counts: list[int]  # for each optimizer, the number of parameters that have a state
    tensors: list[int]  # the identities of the tensors in the states
    # The values that are not tensors, and before them the versions of the tensors if the walk has not listed
    # these tensors.
    rest: list[Any]


class ChangeDetector:
    """Takes footprints of the replicated `objects` and compares them with the current state.

    One thread takes the footprints; other threads may compare them at the same time.
    """

    def __init__(
        self, objects: Mapping[str, Any], elsewhere: Callable[[torch.Tensor], bool] = lambda _: False
    ) -> None:
        """Prepare to watch `objects`. `elsewhere` returns whether a tensor is on a device."""
        self._objects = objects
        self._elsewhere = elsewhere
        self._plain = {name: value for name, value in objects.items() if _is_plain(value)}
        self._optimizers = [value for value in map(capture.unwrap, objects.values()) if is_optimizer(value)]
        self._others = {name: value for name, value in objects.items() if _is_other(value)}
        self._walk: _Walk | None = None
        self._walked_states: _States | None = None  # the optimizers' states at the time of the walk
        self._replaced = -1  # the last step that replaced tensors of an optimizer's state
        # True if every step replaces the tensors in the optimizers' states. The walk then holds no references
        # to them, because these would keep the old tensors in memory.
        self._loose = False
        self.unseen: list[str] = []  # objects whose changes cannot be detected

    def footprint(self, step: int, walk: bool = False) -> Footprint:
        """Return a footprint of the current state.

        With `walk`, first search for parameters that were added or replaced, and list all again if there are
        any.
        """
        import torch

        known = self._walk
        states = None if known is None else self._states(known)
        if known is not None and states is not None:
            if walk:
                walk, self._walked_states = not self._is_current(known), states
            else:
                walk = _places(known.watched) != known.watched_places
                walk = walk or self._replaced_tensors(states, step)
        if known is None or states is None or walk:
            with torch.no_grad():
                known = self._walk = self._walk_all()
            states = self._walked_states = self._states(known)
        shown = _shown(known.called)
        return Footprint(step, known, *_contents(known), self._values(), self._options(), states, shown)

    def _replaced_tensors(self, now: _States, step: int) -> bool:
        """Return whether tensors in the optimizers' states were replaced since the last walk.

        If two consecutive steps replace tensors, this sets `_loose`, and replacements are ignored after that.
        """
        then = self._walked_states
        if then is None or self._loose or (now.counts, now.tensors) == (then.counts, then.tensors):
            return False
        if now.counts == then.counts:
            self._loose = self._replaced == step - 1
            self._replaced = step
        return True

    @property
    def finds_as_collector(self) -> bool:
        """False if a module decides itself what its parameters are, which only another walk can find."""
        return self._walk is not None and self._walk.form is not None

    def first_change(self, since: Footprint) -> str | None:
        """Describe the first change since `since`; return None if nothing has changed."""
        return self.first_write(since) or self._differs(since)

    def first_write(self, since: Footprint) -> str | None:
        """Check as `first_change` does, but only for writes by torch's operators to tensors of `since`."""
        walk = since.walk
        versions = _versions(walk)
        if versions != since.versions:
            return f"{_first(walk.names, versions, since.versions)} was written"
        if self._states(walk) != since.states:
            return "an optimizer's state was written"
        return None

    def sampled_change(self, since: Footprint) -> str | None:
        """Check as `first_change` does, but look for replaced parameters only in a sample.

        This is fast enough for every step.
        """
        walk = since.walk
        if (what := self.first_write(since)) is not None:
            return what
        if _places(walk.watched) != walk.watched_places:
            return "parameters were replaced"
        return self._contents_differ(since)

    def plain_change(self, since: Footprint) -> str | None:
        """Check as `first_change` does, but only for changes to objects other than modules and optimizers.

        This takes a few microseconds.
        """
        values = self._values()
        then = since.plain
        # Unchanged values are nearly always the same objects, and Python compares these without a call.
        is_same = len(values) == len(then) and all(map(is_, values, then))
        if not is_same and (len(values) != len(then) or any(map(_differ, values, then))):
            return f"{' or '.join(self._plain)} was changed"
        shown = _shown(since.walk.called)
        return next((f"{name} was changed" for name, was in since.shown.items() if shown[name] != was), None)

    def renew(self, since: Footprint) -> Footprint | None:
        """Return a new footprint for the step of `since`, or None if the state differs from that footprint.

        Only content and addresses are compared. Version counters are ignored, because they stay changed after
        a script has swapped in other weights and then restored its own.
        """
        if self._differs(since) is not None:
            return None
        contents, states = _contents(since.walk), self._states(since.walk)
        return Footprint(since.step, since.walk, *contents, since.plain, since.options, states, since.shown)

    def late_change(self, since: Footprint) -> str | None:
        """Check as `plain_change` does, and compare the optimizers' options as well.

        Call this only at the end of the tail. For later copies it would be too strict, because many scripts
        set the learning rate when a step begins.
        """
        if (what := self.plain_change(since)) is not None:
            return what
        if self._options_changed(since):
            return "a learning rate or another option of an optimizer was changed"
        return None

    def _options_changed(self, since: Footprint) -> bool:
        now, then = self._options(), since.options
        try:
            return now != then  # for identical items, the comparison of lists does not call `==`
        except RuntimeError:  # two items are different tensors, and their `==` has no single truth value
            return len(now) != len(then) or any(map(_differ, now, then))

    def _differs(self, since: Footprint) -> str | None:
        walk = since.walk
        now = dict(self._tensors())
        for name, tensor in zip(walk.names, walk.tensors, strict=False):  # `names` also covers `lists`
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
        return self.plain_change(since)

    def _values(self) -> list[Any]:
        """Return the attributes of the schedulers and scalers, and the versions of their tensors."""
        import torch

        found: list[Any] = list(chain.from_iterable(map(_attributes, self._plain.values())))
        tensor = torch.Tensor
        return [*found, *[capture.version(each) for each in found if isinstance(each, tensor)]]

    def _options(self) -> list[Any]:
        """Return the values in the optimizers' groups, and the versions of learning rates in tensors."""
        groups = [group for each in self._optimizers for group in each.param_groups]
        rates = [group.get("lr") for group in groups]
        return [*_flat(map(_values, groups)), *map(capture.version, rates)]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the watched tensors of modules and optimizers, with their names."""
        yield from _parameters(self._objects)
        if not self._loose:
            yield from _kept_by_optimizers(self._objects)

    def _walk_all(self) -> _Walk:
        parameters = [tensor for _, tensor in _parameters(self._objects)]
        named = list(self._tensors())
        trained, frozen = ([t for t in parameters if t.requires_grad is kind] for kind in (True, False))
        kept = [
            (each, tuple(_sample(_states_of_tensors(each), SAMPLED)))
            for top in self._optimizers
            for each in (top, *capture.wrapped_optimizers(top).values())
        ]
        frozen = _sample(frozen, SAMPLED)
        watched = [*trained, *frozen]
        others = [] if self._loose else _sample([t for _, t in named[len(parameters) :]], SAMPLED)
        held = [tensor.detach() for tensor in (*_sample(trained, SAMPLED), *frozen, *others)]
        each_has = max(1, WORDS // max(1, len(held)))
        words = [
            word for tensor in held if not self._elsewhere(tensor) for word in _word_views(tensor, each_has)
        ]
        names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
        lists, called, kinds = self._look_at_others()
        names += kinds
        places = _places(tensors)
        listed = set(map(id, tensors))
        has_states = all(id(each) in listed for each in _tensors_and_rest(kept)[0])
        form = self._form()
        watched_places = _places(watched)
        return _Walk(
            names,
            tensors,
            places,
            watched,
            watched_places,
            held,
            words,
            kept,
            has_states,
            lists,
            called,
            form,
        )

    def _form(self) -> _Form | None:
        """Return where the watched tensors are; None if a module decides itself what its parameters are."""
        import torch

        values = [capture.unwrap(value) for value in self._objects.values()]
        tops = [value for value in values if isinstance(value, torch.nn.Module)]
        modules = [each for top in tops for each in top.modules()]
        if any(_enumerates_itself(each) for each in modules):
            return None
        optimizers = [
            each for top in self._optimizers for each in (top, *capture.wrapped_optimizers(top).values())
        ]
        averages = [each for each in modules if capture.is_average_count(each, "n_averaged")]
        return _Form(
            modules,
            optimizers,
            averages,
            not self._loose,
            *_held(values, modules, optimizers, averages, not self._loose),
        )

    def _is_current(self, walk: _Walk) -> bool:
        """Return whether another walk would find the same tensors at the same addresses."""
        form = walk.form
        if form is None:
            return False
        values = [capture.unwrap(value) for value in self._objects.values()]
        names, objects, marks = _held(values, form.modules, form.optimizers, form.averages, form.with_states)
        return (
            len(objects) == len(form.objects)
            and all(map(is_, objects, form.objects))
            and (names, marks) == (form.names, form.marks)
            and _places(walk.tensors) == walk.places
            and self._others_are_as(walk)
        )

    def _others_are_as(self, walk: _Walk) -> bool:
        lists, called, names = self._look_at_others()
        return (
            called.keys() == walk.called.keys()
            and names == walk.names[len(walk.tensors) :]
            and all(map(is_, lists, walk.lists))
        )

    def _look_at_others(self) -> tuple[list[torch.Tensor], dict[str, Any], list[str]]:
        """Decide how to watch each object of the script's own classes.

        Returns the tensors whose versions are compared, the objects whose state_dict is called, and the names
        of those tensors. Sets `unseen`.
        """
        lists: list[torch.Tensor] = []
        called: dict[str, Any] = {}
        names: list[str] = []
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
        return lists, called, names

    def _states(self, walk: _Walk) -> _States:
        """Return the optimizers' states for the sampled parameters. This takes a few microseconds."""

        tensors, rest = _tensors_and_rest(walk.kept)
        counts = [len(each.state) for each in self._optimizers]
        if not walk.has_states:
            rest = [*capture.versions(tensors), *rest]
        return _States(counts, list(map(id, tensors)), rest)


def _states_of_tensors(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the places of the states that belong to a tensor and are not empty."""
    return [n for n, (key, has) in enumerate(optimizer.state.items()) if _is_tensor(key) and has]


def _tensors_and_rest(
    kept: list[tuple[torch.optim.Optimizer, tuple[int, ...]]],
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the tensors in the states at these places, and the plain values."""
    import torch

    found: list[Any] = []
    for optimizer, places in kept:
        states = list(optimizer.state.values())
        for n in places:
            if n < len(states) and isinstance(states[n], dict):
                found += states[n].values()
    tensor, plain = torch.Tensor, _FIXED
    return [v for v in found if isinstance(v, tensor)], [v for v in found if type(v) in plain]


def _held(
    values: list[Any],
    modules: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    averages: list[torch.nn.Module],
    with_states: bool,
) -> tuple[list[str], list[Any], list[bool]]:
    """Return the names, the objects and the flags that determine what a walk finds."""
    import torch

    kinds = [each for module in modules for each in (module._parameters, module._modules)]
    names = [*_flat(kinds)]
    objects: list[Any] = [
        *values,
        *_flat(map(_values, kinds)),
        *(each._buffers.get("n_averaged") for each in averages),
    ]
    marks = [
        each.requires_grad for module in modules for each in module._parameters.values() if each is not None
    ]
    for optimizer in optimizers:
        objects += [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        objects += capture.parameters(optimizer)
        objects += optimizer.state
        states = list(optimizer.state.values())
        marks += map(bool, states)
        if with_states:
            tensor = torch.Tensor
            objects += [value for value in _flat(map(_values, states)) if isinstance(value, tensor)]
    return names, objects, marks


def _enumerates_itself(module: torch.nn.Module) -> bool:
    """Return whether a class has replaced one of the methods with which a walk finds parameters."""
    import torch

    own, torchs = type(module), torch.nn.Module
    return any(
        getattr(own, name) is not getattr(torchs, name)
        for name in ("named_parameters", "named_modules", "_named_members", "modules")
    )


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
    """Yield the parameters of the modules, and then the parameters that only an optimizer has."""
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
    """Yield the tensors in the optimizers' states, and the update counts of averaged models."""
    import torch

    for name, value in objects.items():
        value = capture.unwrap(value)
        if isinstance(value, torch.nn.Module):
            yield from capture.average_counts(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            for optimizer in (value, *capture.wrapped_optimizers(value).values()):
                yield from _state_tensors(name, optimizer)


def _state_tensors(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in one optimizer's state. Their names begin with `name`."""
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
    """Return the plain values in each object's state, and the address and version of each of its tensors."""
    return {name: list(map(_leaf_value, _leaves(value.state_dict()))) for name, value in objects.items()}


def _leaf_value(leaf: Any) -> Any:
    return (leaf.data_ptr(), *capture.versions([leaf])) if _is_tensor(leaf) else leaf


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    import torch

    return isinstance(value, torch.Tensor)


def _is_other(value: Any) -> bool:
    """Return whether `value` is of one of the script's own classes and, unlike data, not iterable."""
    import torch

    ours = (torch.nn.Module, torch.optim.Optimizer)
    data = any(hasattr(type(value), each) for each in ("__iter__", "__next__"))
    return not (data or isinstance(capture.unwrap(value), ours) or _is_plain(value))


def _is_plain(value: Any) -> bool:
    import torch

    return isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of a scheduler or a scaler.

    The first call of a scaler's `scale()` creates tensors. Until one of them changes, None represents it,
    because creating it does not change the state.
    """
    import torch

    held = vars(value)
    if not isinstance(value, torch.amp.GradScaler):
        return list(held.values())
    made = {name: held.get(f"_init{name}") for name in ("_scale", "_growth_tracker")}
    return [None if name in made and _is_just(each, made[name]) else each for name, each in held.items()]


def _is_just(value: Any, initial: Any) -> bool:
    """Return whether `value` is a tensor that was created with the value `initial` and not written since.

    The content of a tensor on a device is not checked, because reading it would mean waiting for the device.
    """
    if not _is_tensor(value) or capture.version(value):
        return False
    return value.device.type != "cpu" or bool(value == initial)


def _differ(now: Any, then: Any) -> bool:
    """Return whether two values differ. Mutable values are compared by identity."""
    plain = isinstance(now, _FIXED) and isinstance(then, _FIXED)
    compare: Callable[[Any, Any], bool] = ne if plain else is_not
    return compare(now, then)


def _sample(found: list[_T], most: int) -> list[_T]:
    """Return at most `most` of `found`, evenly spaced."""
    count = min(most, len(found))
    return [found[n * len(found) // count] for n in range(count)]


def _word_views(tensor: torch.Tensor, count: int) -> list[Any]:
    """Return live views of up to `count` words of a tensor's memory.

    The result is empty if the tensor is on a device or not dense.
    """
    if tensor.device.type != "cpu" or not capture.is_dense(tensor.shape, tensor.stride()):
        return []
    kind = ctypes.c_uint64 if tensor.nbytes >= 8 else ctypes.c_uint8
    size = ctypes.sizeof(kind)
    if tensor.nbytes < size:
        return []
    inside = tensor.nbytes // size
    places = sorted({(2 * n + 1) * inside // (2 * count) for n in range(count)})
    return [kind.from_address(tensor.data_ptr() + at * size) for at in places]
