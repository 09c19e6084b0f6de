"""Collect a rank's private state (random generators, module buffers, data position) in one small blob.

Before every optimizer step, the blob is stored and sent to another member, so it must be cheap to build: few
names, and no arrays of numbers as JSON. Buffers, such as batch norm's statistics, are private state because
each forward pass changes them differently on each rank of a DDP group.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, type_with_article
from holdfast.snapshot import tensor_copy
from holdfast.state import advice, capture
from holdfast.state.capture import PAIRS, TUPLE
from holdfast.state.random_state import (
    RandomGenerators,
    Section,
    generator_state,
    is_generator_state,
    tensor_bytes,
)

if TYPE_CHECKING:
    import torch

    from holdfast.state.loss_guard import LossGuard

_MAGIC = b"HFPS\x01"
_SECTION = struct.Struct("<HQ")  # length of the name, length of the content
GENERATOR = "holdfast.generator"  # {"holdfast.generator": base64} is the state of a torch.Generator
# An unsaved buffer should be the same after both of these steps of a generation.
COMPARED_STEPS = (2, 4)
_PLAIN = {int, str, type(None)}  # immutable types whose equal values have the same JSON
_SCALARS = {bool, int, float, str, type(None)}
_TEXT = {str}
_encode = json.JSONEncoder(separators=(",", ":")).encode

_Table = dict[str, "torch.Tensor | None"]
_TensorVersion = tuple[int, "int | None"]  # the identity and version of a tensor
_Place = tuple[str, _Table, str]  # a buffer's name, its module's table of buffers, its key in that table


class PrivateState:
    """Collects and restores the private state of this rank.

    It consists of the random generators, the states of `objects`, which must be JSON, and the buffers of
    `modules`. It also contains the recent losses of `guard`, so that a resumed run checks losses as an
    uninterrupted run would.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        objects: Mapping[str, Any],
        device: torch.device,
        guard: LossGuard | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare to collect the state of these modules and objects.

        `moved` contains the replicated objects whose state earlier versions stored in the blob.
        """
        self._guard = guard
        self.moved = dict(moved or {})
        self._modules = modules
        self._objects = dict(objects)
        self._plain: dict[str, dict[str, Any]] | None = None  # the states that are encoded in `_text`
        self._text = b""
        self._device = device
        self._generators = RandomGenerators(device)
        # These are places in a module, not tensors, because a module may replace the tensor of a buffer.
        self._buffers: list[_Place] = []
        self._transient: list[_Place] = []  # the non-persistent buffers, which are not saved
        self._counts: list[_Place] = []  # replicated state that earlier versions stored in the blob
        # Each additional place of a buffer, with the buffer's place in `_buffers`.
        self._aliases: list[tuple[_Place, _Place]] = []
        first: dict[int, _Place] = {}
        for name, module in modules.items():
            for path, table, key, kind in _buffers(module):
                place = (f"{name}.{path}", table, key)
                places = {"kept": self._buffers, "transient": self._transient, "count": self._counts}
                buffer = table[key]
                if kind != "kept" or buffer is None:
                    places[kind].append(place)
                elif (known := first.setdefault(id(buffer), place)) is place:
                    self._buffers.append(place)
                else:
                    self._aliases.append((place, known))
        self._tied = _tied(modules, self._buffers)
        everywhere = [*self._buffers, *(place for place, _ in self._aliases)]
        # If every optimizer step turns a section into a copy of another section, this maps the first section
        # to the second one.
        self._copies: dict[str, str] = {}
        self._no_copies: set[str] = set()  # sections that once differed from the expected copy
        self._started = {name: _shape(table[key]) for name, table, key in everywhere}
        self._versions_at: dict[int, list[_TensorVersion]] = {}  # of the transient buffers, by step

    def collect(self) -> bytes:
        """Return the blob of the current state."""
        return self.blob(self.core())

    def blob(self, core: list[Section]) -> bytes:
        """Return a blob that contains the sections of `core` and the guard's current losses."""
        return b"".join([_MAGIC, *_framed(core), *_framed(self._learned())])

    def core(self, expected: bool = False) -> list[Section]:
        """Return the sections that must not change between the optimizer's first write and the commit.

        If `expected` is True, and the optimizer's step turns a buffer into a copy of another buffer (see
        `learn_copies`), the result has the content that this buffer will have at the commit.
        """
        sections = self.quick()
        if self._buffers or self._aliases:
            sections += self._buffer_sections()
        if not expected or not self._copies:
            return sections
        there = dict(sections)
        return [(key, there.get(self._copies.get(key, key), content)) for key, content in sections]

    def learn_copies(self, core: list[Section]) -> bool:
        """Record the buffers that have become copies of other buffers since `core`.

        For example, an averaged model copies the buffers of its model. Later calls of `core(expected=True)`
        expect the same copies. If a buffer differs from the expected copy at a commit, it is never expected
        to be a copy again.

        Returns whether these two cases explain all changes since `core`.
        """
        before, now = dict(core), dict(self.core())
        changed = {key for key in (*before, *now) if before.get(key) != now.get(key)}
        buffers: dict[bytes, list[str]] = {}
        for key, content in now.items():
            if key.startswith("buffer:") and key not in changed:
                buffers.setdefault(content, []).append(key)
        explained = True
        for key in changed:
            alike = [] if key in self._no_copies else buffers.get(now.get(key, b""), [])
            if self._copies.pop(key, None) is not None:
                self._no_copies.add(key)
            elif alike and key.startswith("buffer:"):
                self._copies[key] = max(alike, key=lambda each: _common_end(each, key))
            else:
                explained = False
        return explained

    def quick(self) -> list[Section]:
        """Return the first sections of `core`, which can change even without a forward pass."""
        sections = self.random()
        if self._objects:
            sections.append(("objects", self._described()))
        return sections

    def with_buffers(self, core: list[Section]) -> list[Section]:
        """Return `core` with the current content of the buffers."""
        return [*(each for each in core if not _is_buffer(each[0])), *self._buffer_sections()]

    def changed_after(self, core: list[Section]) -> str | None:
        """Return the name of a buffer that differs from `core`, or None.

        A buffer that is now a copy of an unchanged buffer is ignored, because the script would make the same
        copy after a restart.
        """
        before, now = dict(core), dict(self._buffer_sections())
        changed = {key: content for key, content in now.items() if before.get(key) != content}
        others = {content for key, content in now.items() if key not in changed}
        return next(
            (key.partition(":")[2] for key, content in changed.items() if content not in others), None
        )

    def is_still(self, core: list[Section], closely: bool) -> bool:
        """Return whether nothing has changed since `core`.

        Buffers are compared byte by byte, because writes through `.data` do not change a version counter.
        Buffers on a device are compared only if `closely` is True, because reading them means waiting for the
        device.
        """
        found = self.quick()
        if not self._buffers and not self._aliases:
            return found == core
        if found != core[: len(found)]:
            return False
        rest = dict(core[len(found) :])
        for name, table, key in self._distinct_buffers():
            buffer, content = table[key], rest.pop(f"buffer:{name}", None)
            shape = _shape(buffer)
            text = rest.pop(f"shape:{name}", None)
            if buffer is None or content is None:
                if buffer is not None or content is not None:
                    return False
                continue
            if text != (_encode(shape).encode() if shape != self._started[name] else None):
                return False
            if (closely or buffer.device.type == "cpu") and not _holds(buffer, content):
                return False
        return not rest

    def largest(self, count: int) -> list[tuple[str, int]]:
        """Return the names and sizes in bytes of the `count` largest buffers, largest first."""
        sizes = [(name, b.nbytes) for name, table, key in self._buffers if (b := table[key]) is not None]
        return sorted(sizes, key=lambda each: -each[1])[:count]

    def versions(self) -> list[_TensorVersion]:
        """Return a list that changes whenever a buffer is written or replaced. This reads no content."""
        return _versions_of(self._buffers)

    def transient(self, done: int) -> str | None:
        """Return the name of an unsaved buffer that changes from step to step, or None.

        Call this at the end of each step. `done` is the number of steps that this generation has completed.
        The first step is ignored, because a script may fill a buffer in it, such as a lookup table, and not
        change the buffer afterwards.
        """
        if done > COMPARED_STEPS[1] or done not in COMPARED_STEPS or not self._transient:
            return None
        self._versions_at[done] = _versions_of(self._transient)
        if done == COMPARED_STEPS[0] or COMPARED_STEPS[0] not in self._versions_at:
            return None
        pairs = zip(self._transient, *(self._versions_at[n] for n in COMPARED_STEPS), strict=True)
        return next((place[0] for place, then, now in pairs if then != now), None)

    def added(self, done: int) -> str | None:
        """Return the name of a buffer that was registered too late to be saved, or None.

        Call this at the end of each step, like `transient`.
        """
        if done not in COMPARED_STEPS:
            return None
        aliases = (place for place, _ in self._aliases)
        places = (*self._buffers, *aliases, *self._transient, *self._counts)
        known = {(id(table), key) for _, table, key in places}
        for name, module in self._modules.items():
            for path, table, key, kind in _buffers(module):
                if kind == "kept" and (id(table), key) not in known:
                    return f"{name}.{path}"
        return None

    def objects(self) -> bytes:
        """Return the private objects' states as JSON; empty if there are no private objects."""
        return self._described() if self._objects else b""

    @property
    def own(self) -> Mapping[str, Any]:
        """The private objects, by name."""
        return self._objects

    def no_data(self, names: set[str]) -> list[str]:
        """Return the sorted names of the objects in `names` that, unlike data loaders, are not iterable."""
        data = ("__iter__", "__next__")
        return [n for n in sorted(names) if not any(hasattr(type(self._objects[n]), each) for each in data)]

    def _described(self) -> bytes:
        """Return the objects' states as JSON. If they have not changed, reuse the last result."""
        states = {name: value.state_dict() for name, value in self._objects.items()}
        plain = all(map(_is_plain, states.values()))
        if not plain or states != self._plain:
            try:
                self._text = _encode(states if plain else _tagged(states)).encode()
            except (TypeError, ValueError, RecursionError):
                raise BadInput(advice.not_json(states)) from None
            self._plain = {name: dict(each) for name, each in states.items()} if plain else None
        return self._text

    def _learned(self) -> list[Section]:
        """Return the guard's window of recent losses."""
        if self._guard is None:
            return []
        return [(f"guard:{k}", array("d", v).tobytes()) for k, v in self._guard.learned().items()]

    def random(self) -> list[Section]:
        """Return the state of every generator that a script may use."""
        return self._generators.read()

    def restore(self, blob: bytes) -> dict[str, bytes]:
        """Restore buffers, objects and the guard; return the sections, for a later call of `restore_random`.

        Call this after the parameters are restored, because a buffer that shares a parameter's memory is
        restored together with the parameter. A buffer is replaced by a tensor with its own memory in two
        cases: if it cannot be written in place, or if it shares memory now but did not when the blob was
        made.

        Raises:
            BadInput: the blob is from a different model.
        """
        sections = parse_sections(blob)
        held = {name: content for name, content in sections.items() if name.startswith("buffer:")}
        counts = [place for place in self._counts if f"buffer:{place[0]}" in held]
        filled: list[tuple[_Place, torch.Tensor, bytes]] = []
        for place in [*self._buffers, *counts]:
            name, table, key = place
            content = held.pop(f"buffer:{name}", None)
            if content is None and name in self._tied:
                continue  # the buffer was restored with its parameter
            if f"shape:{name}" in sections:
                table[key] = self._made(place, sections[f"shape:{name}"], content or b"")
            buffer = table[key]
            if content is None and buffer is None:
                continue
            if content is None or buffer is None or len(content) != buffer.nbytes:
                raise BadInput(f"the snapshot is from a different model: {name} differs")
            filled.append((place, buffer, content))
            if name not in self._tied:  # a write to a tied buffer would change its parameter
                _fill(buffer, content)
        for (_, table, key), buffer, content in filled:
            if not _holds(buffer, content):
                table[key] = _fresh(buffer, content)
        for place, known in self._aliases:
            self._restore_alias(place, known, held.pop(f"buffer:{place[0]}", None), sections)
        if held:
            name = next(iter(held))[7:]
            raise BadInput(f"the snapshot is from a different model: {name} is not in the script's model")
        self._restore_objects(sections.get("objects", b"{}"))
        self._restore_guard(sections)
        return sections

    def _restore_alias(
        self, place: _Place, known: _Place, content: bytes | None, sections: Mapping[str, bytes]
    ) -> None:
        """Restore a buffer that was the same tensor as the buffer at `known` when the script started.

        The buffer becomes that tensor again, unless the blob has different `content` for it. In that case, it
        was a separate tensor when the blob was made, so it gets its own memory.
        """
        name, table, key = place
        one: torch.Tensor | None = known[1][known[2]]
        table[key] = one
        if content is None:
            return
        if f"shape:{name}" in sections:
            table[key] = _fresh(self._made(place, sections[f"shape:{name}"], content), content)
        elif one is None or _shape(one) != self._started[name] or not _holds(one, content):
            table[key] = _fresh(self._made(place, _encode(self._started[name]).encode(), content), content)

    def _made(self, place: _Place, shape: bytes, content: bytes) -> torch.Tensor:
        name, table, key = place
        old = table[key]
        return _made(name, shape, content, self._device if old is None else old.device)

    def _restore_objects(self, text: bytes) -> None:
        try:
            state = _untagged(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(f"private state: the states of its objects are not JSON: {error}") from None
        if not isinstance(state, dict):
            raise BadInput("private state: the states of its objects are not a JSON object")
        for name, value in {**self._objects, **self.moved}.items():
            if name not in state:
                continue
            try:
                value.load_state_dict(state[name])
            except Exception as error:  # a user's class may raise anything for an unsuitable state
                raise BadInput(
                    f"{name}: {type_with_article(value)} cannot load this state: {error!r}"
                ) from error

    def _restore_guard(self, sections: Mapping[str, bytes]) -> None:
        if self._guard is None:
            return
        learned = {k: array("d") for k in self._guard.learned()}
        try:
            for name, values in learned.items():
                values.frombytes(sections.get(f"guard:{name}", b""))
            self._guard.restore({name: values.tolist() for name, values in learned.items()})
        except ValueError as error:
            raise BadInput(f"private state: {error}") from None

    def restore_random(self, sections: Mapping[str, bytes]) -> None:
        """Set every generator to its saved state. Raises `BadInput` if a generator refuses its state."""
        self._generators.restore(sections)

    def reseed_random(self, *what: object) -> None:
        """Seed every generator with a hash of `what`, for a rank that shares its restored state."""
        self._generators.seed(what)

    def _distinct_buffers(self) -> Iterator[_Place]:
        """Yield the buffers that do not share memory with a parameter or with an earlier buffer."""
        for place in self._buffers:
            if place[0] not in self._tied or not _is_tied(place, self._tied[place[0]]):
                yield place
        for place, known in self._aliases:
            if place[1][place[2]] is not known[1][known[2]]:
                yield place

    def _buffer_sections(self) -> list[Section]:
        found: list[Section] = []
        for name, table, key in self._distinct_buffers():
            buffer = table[key]
            if buffer is None:
                continue
            found.append((f"buffer:{name}", tensor_bytes(buffer)))
            if (shape := _shape(buffer)) != self._started[name]:
                found.append((f"shape:{name}", _encode(shape).encode()))
        return found


def first_changed(before: list[Section], now: list[Section]) -> str:
    """Return the first difference between two private states, as a phrase for a message."""
    then = dict(before)
    name = next((key for key, content in now if then.get(key) != content), "")
    kind, _, rest = name.partition(":")
    if kind in ("buffer", "shape"):
        return f"the buffer {rest}"
    if name == "objects":
        return min(changed_objects(before, now), default=name)
    return f"the random state of {name}" if name else "private state"


def changed_objects(before: list[Section], now: list[Section]) -> set[str]:
    """Return the names of the objects whose states differ between two private states."""
    was, is_ = (dict(each).get("objects") or b"{}" for each in (before, now))
    if was == is_:
        return set()
    old = json.loads(was)
    return {key for key, state in json.loads(is_).items() if old.get(key) != state}


def _is_buffer(name: str) -> bool:
    return name.startswith(("buffer:", "shape:"))


def _common_end(one: str, other: str) -> int:
    """Return the number of trailing parts that two dotted names have in common."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _fill(buffer: torch.Tensor, content: bytes) -> None:
    """Write `content` to the buffer. If that is impossible, leave the buffer unchanged.

    This happens if elements of an expanded buffer share memory but differ in `content`, or if the buffer is
    an inference tensor.
    """
    import torch

    if not content or buffer.is_inference():
        return
    source = torch.frombuffer(bytearray(content), dtype=buffer.dtype).view(buffer.shape)
    target = buffer.detach()
    for at, stride in enumerate(buffer.stride()):
        # In an expanded buffer, all elements along this dimension share memory.
        if stride == 0 and buffer.shape[at] > 1:
            source, target = source.narrow(at, 0, 1), target.narrow(at, 0, 1)
    if source.shape == buffer.shape or tensor_bytes(source.expand(buffer.shape)) == content:
        with torch.no_grad():
            target.copy_(source)


def _fresh(like: torch.Tensor, content: bytes) -> torch.Tensor:
    """Return a new tensor like `like` that has its own memory and this `content`."""
    import torch

    with torch.no_grad():
        found = torch.empty_like(like.detach(), memory_format=torch.preserve_format)
        found = found if capture.is_dense(found.shape, found.stride()) else torch.empty_like(found)
    _fill(found, content)
    return found


def _holds(buffer: torch.Tensor, content: bytes) -> bool:
    if buffer.nbytes != len(content):
        return False
    if buffer.device.type != "cpu" or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        return tensor_bytes(buffer) == content
    return tensor_copy.same_bytes(buffer.data_ptr(), content, len(content))


def _is_plain(state: object) -> bool:
    return (
        type(state) is dict
        and _TEXT.issuperset(map(type, state))
        and _PLAIN.issuperset(map(type, state.values()))
    )


def _tagged(value: Any) -> Any:
    """Return a copy of `value` with tagged objects instead of values that JSON cannot represent.

    These are tuples, mappings with keys that are not strings, and states of generators. Raises TypeError for
    a key that is not a scalar.
    """
    if isinstance(value, dict):
        pairs = value.items()
        if not _SCALARS.issuperset(map(type, value.values())):
            pairs = {key: _tagged(each) for key, each in pairs}.items()
        if _TEXT.issuperset(map(type, value)) and not value.keys() & {PAIRS, TUPLE, GENERATOR}:
            return dict(pairs)
        if odd := next((k for k in value if not isinstance(k, (bool, int, float, str, type(None)))), None):
            raise TypeError(f"a key {odd!r}")
        return {PAIRS: [list(pair) for pair in pairs]}
    if isinstance(value, (list, tuple)):
        plain = _SCALARS.issuperset(map(type, value))
        items = value if plain else [_tagged(each) for each in value]
        return {TUPLE: items} if isinstance(value, tuple) else items
    return {GENERATOR: b64encode(tensor_bytes(value)).decode()} if is_generator_state(value) else value


def _untagged(value: Any) -> Any:
    """Return the value that `_tagged` encoded. Any other input may raise ValueError or TypeError."""
    if isinstance(value, list):
        return value if _SCALARS.issuperset(map(type, value)) else [_untagged(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(_untagged(_listed(value[TUPLE])))
    if value.keys() == {GENERATOR}:
        return generator_state(b64decode(value[GENERATOR], validate=True))
    pairs = value.items() if value.keys() != {PAIRS} else _listed(value[PAIRS])
    return {key: _untagged(each) for key, each in pairs}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.60} is not a list")
    return value


def _framed(sections: list[Section]) -> list[bytes]:
    parts: list[bytes] = []
    for name, content in sections:
        raw = name.encode()
        parts += [_SECTION.pack(len(raw), len(content)), raw, content]
    return parts


def parse_sections(blob: bytes) -> dict[str, bytes]:
    """Return the sections of a blob by name. Raises `BadInput` if the blob is invalid or incomplete."""
    if not blob.startswith(_MAGIC):
        raise BadInput("private state: not written by holdfast")
    at, found = len(_MAGIC), {}
    while at < len(blob):
        if at + _SECTION.size > len(blob):
            raise BadInput("private state: truncated")
        name_bytes, content_bytes = _SECTION.unpack_from(blob, at)
        at += _SECTION.size
        end = at + name_bytes + content_bytes
        if end > len(blob):
            raise BadInput("private state: truncated")
        name = blob[at : at + name_bytes].decode(errors="replace")
        found[name] = blob[at + name_bytes : end]
        at = end
    return found


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, _Table, str, str]]:
    """Yield the name, table, key and kind ("kept", "transient" or "count") of each buffer of `module`."""
    for path, each in module.named_modules():
        for key in each._buffers:
            kind = "transient" if key in each._non_persistent_buffers_set else "kept"
            kind = "count" if capture.is_average_count(each, key) else kind
            yield f"{path}.{key}" if path else key, each._buffers, key, kind


def _tied(modules: Mapping[str, Any], places: list[_Place]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the buffers that share a parameter's memory, each with that parameter, by buffer name."""
    homes: dict[int, list[torch.Tensor]] = {}
    for module in modules.values():
        for parameter in module.parameters():
            homes.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, table, key in places:
        if (buffer := table[key]) is not None:
            here = homes.get(buffer.untyped_storage().data_ptr(), [])
            if (parameter := next((each for each in here if _lies_in(buffer, each)), None)) is not None:
                found[name] = buffer, parameter
    return found


def _is_tied(place: _Place, pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return place[1][place[2]] is pair[0] and _lies_in(*pair)


def _lies_in(buffer: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether all of the buffer's memory belongs to the parameter.

    It is not enough that both use the same storage, because the storage may contain them side by side.
    """
    if not buffer.nbytes or not capture.is_dense(parameter.shape, parameter.stride()):
        return False
    last = sum((size - 1) * step for size, step in zip(buffer.shape, buffer.stride(), strict=True))
    at = buffer.data_ptr() - parameter.data_ptr()
    within = 0 <= at <= parameter.nbytes - (last + 1) * buffer.itemsize
    return within and buffer.device == parameter.device


def _versions_of(places: list[_Place]) -> list[_TensorVersion]:
    """Return the identity and version of the tensor at each of `places`."""
    return [(id(table[key]), capture.version(table[key])) for _, table, key in places] if places else []


def _shape(buffer: torch.Tensor | None) -> list[Any] | None:
    return None if buffer is None else [str(buffer.dtype).removeprefix("torch."), *buffer.shape]


def _made(name: str, text: bytes, content: bytes, device: torch.device) -> torch.Tensor:
    """Return an uninitialised buffer on `device` with the data type and shape in `text`.

    Raises BadInput if `text` is invalid or does not match the size of `content`.
    """
    import torch

    try:
        kind, *shape = json.loads(text)
        dtype = getattr(torch, kind)
        if math.prod(shape) * dtype.itemsize != len(content) or any(type(n) is not int for n in shape):
            raise ValueError("sizes")
        return torch.empty(shape, dtype=dtype, device=device)
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError):
        raise BadInput(f"private state: {name} has an invalid type or shape") from None
