"""A rank's private state as one small blob: random number generators, module buffers, data position.

It is written before every optimizer step and travels to another member, so it must be cheap: no
JSON of numbers, no names but a few. Buffers (batch norm's statistics) differ between the ranks of a DDP
group from one forward pass to the next, so they are private.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast import capture, memcopy, misuse
from holdfast.errors import BadInput
from holdfast.randomness import Generators, Section, raw

if TYPE_CHECKING:
    import torch

    from holdfast.guard import LossGuard

_MAGIC = b"HFPS\x01"
_SECTION = struct.Struct("<HQ")  # length of the name, length of the content
LOOKS = (2, 4)  # steps of a generation between which a buffer that is not kept should not change
_PLAIN = {int, str, type(None)}  # nothing changes within, and what is equal has the same text
_encode = json.JSONEncoder(separators=(",", ":")).encode

_Table = dict[str, "torch.Tensor | None"]
_Look = tuple[int, "int | None"]  # which tensor, and how often it was written
_Place = tuple[str, _Table, str]  # a buffer's name, the table that has it, its key there


class PrivateState:
    """Collects and restores what is private to this rank.

    `objects` are those whose state is JSON; `modules` those whose buffers are kept. What the `guard`
    has learned goes along, so that a resumed run judges a loss as the first one did.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        objects: Mapping[str, Any],
        device: torch.device,
        guard: LossGuard | None = None,
    ) -> None:
        self._guard = guard
        self._objects = dict(objects)
        self._plain: dict[str, dict[str, Any]] | None = None  # the states that `_text` is of
        self._text = b""
        self._device = device
        self._generators = Generators(device)
        # Where each buffer is, not what is there: a module may put another tensor in its place.
        self._buffers: list[_Place] = []
        self._transient: list[_Place] = []  # not persistent: not kept
        self._counts: list[_Place] = []  # replicated; private in the blobs of earlier versions
        for name, module in modules.items():
            for path, table, key, kind in _buffers(module):
                places = {"kept": self._buffers, "transient": self._transient, "count": self._counts}
                places[kind].append((f"{name}.{path}", table, key))
        self._started = {name: _shape(table[key]) for name, table, key in self._buffers}
        self._looks: dict[int, list[_Look]] = {}  # at the transient ones, by step

    def collect(self) -> bytes:
        """Return the blob of this instant."""
        return self.blob(self.core())

    def blob(self, core: list[Section]) -> bytes:
        """Return the blob made of `core` as it was, and what the guard has learned since."""
        return b"".join([_MAGIC, *_framed(core), *_framed(self._learned())])

    def core(self) -> list[Section]:
        """Return all that must not change between the optimizer's first write and commit."""
        return [*self.quick(), *self._buffer_sections()]

    def quick(self) -> list[Section]:
        """Return the first sections of `core`: those that may change without a forward pass."""
        sections = self.random()
        if self._objects:
            sections.append(("objects", self._described()))
        return sections

    def is_still(self, core: list[Section], closely: bool) -> bool:
        """True when all is as in `core`. Buffers are compared where they lie: `.data` moves no counter.

        Those on a device, which would have to be waited for, only if `closely`.
        """
        found = self.quick()
        if found != core[: len(found)]:
            return False
        rest = dict(core[len(found) :])
        for name, table, key in self._buffers:
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
        """Return the names of the largest buffers, and their bytes."""
        sizes = [(name, b.nbytes) for name, table, key in self._buffers if (b := table[key]) is not None]
        return sorted(sizes, key=lambda each: -each[1])[:count]

    def versions(self) -> list[_Look]:
        """Return what tells that a buffer was written or replaced, at the cost of a look at each."""
        return _looked_at(self._buffers)

    def transient(self, done: int) -> str | None:
        """Name a buffer that is not kept and changes from step to step; to be asked at the end of each.

        One that is made in the first step, as a table is, changes no more.
        """
        if done > LOOKS[1] or done not in LOOKS or not self._transient:
            return None
        self._looks[done] = _looked_at(self._transient)
        if done == LOOKS[0] or LOOKS[0] not in self._looks:
            return None
        pairs = zip(self._transient, *(self._looks[n] for n in LOOKS), strict=True)
        return next((place[0] for place, then, now in pairs if then != now), None)

    def objects(self) -> bytes:
        """Return the objects' states as JSON, empty without objects."""
        return self._described() if self._objects else b""

    def no_data(self, names: set[str]) -> list[str]:
        """Return those of the objects `names` that nobody can iterate over, as one can over a loader."""
        data = ("__iter__", "__next__")
        return [n for n in sorted(names) if not any(hasattr(type(self._objects[n]), each) for each in data)]

    def _described(self) -> bytes:
        """Return the objects' states as JSON, written anew unless they are known to be the same."""
        states = {name: value.state_dict() for name, value in self._objects.items()}
        plain = all(map(_is_plain, states.values()))
        if not plain or states != self._plain:
            try:
                self._text = _encode(states).encode()
            except (TypeError, ValueError, RecursionError):
                raise BadInput(misuse.not_json(states)) from None
            self._plain = {name: dict(each) for name, each in states.items()} if plain else None
        return self._text

    def _learned(self) -> list[Section]:
        """Return what the guard knows: of the steps before, its window of losses."""
        if self._guard is None:
            return []
        return [(f"guard:{k}", array("d", v).tobytes()) for k, v in self._guard.learned().items()]

    def random(self) -> list[Section]:
        """Return the state of every generator that a script may use."""
        return self._generators.read()

    def restore(self, blob: bytes) -> dict[str, bytes]:
        """Put buffers and objects back; return the sections, for `restore_random` later.

        Raises `BadInput` when the blob is of another model.
        """
        import torch

        sections = parse(blob)
        held = {name: content for name, content in sections.items() if name.startswith("buffer:")}
        counts = [place for place in self._counts if f"buffer:{place[0]}" in held]
        for name, table, key in [*self._buffers, *counts]:
            buffer, content = table[key], held.pop(f"buffer:{name}", None)
            if f"shape:{name}" in sections:
                buffer = table[key] = _made(name, sections[f"shape:{name}"], content or b"", self._device)
            if content is None and buffer is None:
                continue
            if content is None or buffer is None or len(content) != buffer.nbytes:
                raise BadInput(f"the snapshot is of another model: {name} differs")
            if content:
                flat = torch.frombuffer(bytearray(content), dtype=buffer.dtype)
                with torch.no_grad():
                    buffer.copy_(flat.view(buffer.shape))
        if held:
            name = next(iter(held))[7:]
            raise BadInput(f"the snapshot is of another model: {name} is not in the model here")
        self._restore_objects(sections.get("objects", b"{}"))
        self._restore_guard(sections)
        return sections

    def _restore_objects(self, text: bytes) -> None:
        try:
            state = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"private state: its objects are not JSON: {error}") from None
        if not isinstance(state, dict):
            raise BadInput("private state: its objects are not an object of JSON")
        for name, value in self._objects.items():
            if name not in state:
                continue
            try:
                value.load_state_dict(state[name])
            except Exception as error:  # whatever a class makes of a state that is not its own
                kind = type(value).__name__
                raise BadInput(f"{name}: a {kind} cannot take this state: {error!r}") from error

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
        """Set every generator to where it was. Raises `BadInput` when one cannot be."""
        self._generators.restore(sections)

    def _buffer_sections(self) -> list[Section]:
        found: list[Section] = []
        for name, table, key in self._buffers:
            buffer = table[key]
            if buffer is None:
                continue
            found.append((f"buffer:{name}", raw(buffer)))
            if (shape := _shape(buffer)) != self._started[name]:
                found.append((f"shape:{name}", _encode(shape).encode()))
        return found


def first_changed(before: list[Section], now: list[Section]) -> str:
    """Name what differs first between two collections of private state, as its user knows it."""
    then = dict(before)
    name = next((key for key, content in now if then.get(key) != content), "")
    kind, _, rest = name.partition(":")
    if kind in ("buffer", "shape"):
        return f"the buffer {rest}"
    if name == "objects":
        return min(changed_objects(before, now), default=name)
    return f"the random state of {name}" if name else "private state"


def changed_objects(before: list[Section], now: list[Section]) -> set[str]:
    """Return the names of the objects whose state differs between two collections."""
    was, is_ = (dict(each).get("objects") or b"{}" for each in (before, now))
    if was == is_:
        return set()
    old = json.loads(was)
    return {key for key, state in json.loads(is_).items() if old.get(key) != state}


def _holds(buffer: torch.Tensor, content: bytes) -> bool:
    if buffer.nbytes != len(content):
        return False
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        return raw(buffer) == content
    return memcopy.same(buffer.data_ptr(), content, len(content))


def _is_plain(state: object) -> bool:
    return type(state) is dict and _PLAIN.issuperset(map(type, state.values()))


def _framed(sections: list[Section]) -> list[bytes]:
    parts: list[bytes] = []
    for name, content in sections:
        raw = name.encode()
        parts += [_SECTION.pack(len(raw), len(content)), raw, content]
    return parts


def parse(blob: bytes) -> dict[str, bytes]:
    """Return the sections of a blob. Raises `BadInput` on anything else."""
    if not blob.startswith(_MAGIC):
        raise BadInput("private state: not written by holdfast")
    at, found = len(_MAGIC), {}
    while at < len(blob):
        if at + _SECTION.size > len(blob):
            raise BadInput("private state: cut short")
        name_bytes, content_bytes = _SECTION.unpack_from(blob, at)
        at += _SECTION.size
        end = at + name_bytes + content_bytes
        if end > len(blob):
            raise BadInput("private state: cut short")
        name = blob[at : at + name_bytes].decode(errors="replace")
        found[name] = blob[at + name_bytes : end]
        at = end
    return found


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, _Table, str, str]]:
    """Yield where each buffer is: its name, the table that has it, its key there, and how it is kept."""
    seen: set[int] = set()  # one that two modules share is yielded once
    for path, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is None or id(buffer) not in seen:
                seen.add(id(buffer))
                kind = "transient" if key in each._non_persistent_buffers_set else "kept"
                kind = "count" if capture.is_count(each, key) else kind
                yield f"{path}.{key}" if path else key, each._buffers, key, kind


def _looked_at(places: list[_Place]) -> list[_Look]:
    """Return of each buffer which tensor it is, and how often that was written."""
    return [(id(table[key]), capture.version(table[key])) for _, table, key in places]


def _shape(buffer: torch.Tensor | None) -> list[Any] | None:
    return None if buffer is None else [str(buffer.dtype).removeprefix("torch."), *buffer.shape]


def _made(name: str, text: bytes, content: bytes, device: torch.device) -> torch.Tensor:
    """Return an empty buffer of the kind that the blob has, on `device`. Raises BadInput."""
    import torch

    try:
        kind, *shape = json.loads(text)
        dtype = getattr(torch, kind)
        if math.prod(shape) * dtype.itemsize != len(content) or any(type(n) is not int for n in shape):
            raise ValueError("sizes")
        return torch.empty(shape, dtype=dtype, device=device)
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError):
        raise BadInput(f"private state: {name} is of no kind that a buffer can be") from None
