"""A rank's private state as one small blob: random number generators, module buffers, data position.

It is written before every optimizer step and travels to another member, so it must be cheap: no
JSON of numbers, no names but a few. Buffers (batch norm's statistics) differ between the ranks of a DDP
group from one forward pass to the next, so they are private.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast import misuse
from holdfast.errors import BadInput
from holdfast.randomness import Generators, Section, raw

if TYPE_CHECKING:
    import torch

    from holdfast.guard import LossGuard

_MAGIC = b"HFPS\x01"
_SECTION = struct.Struct("<HQ")  # length of the name, length of the content
_PLAIN = {int, str, type(None)}  # nothing changes within, and what is equal has the same text
_encode = json.JSONEncoder(separators=(",", ":")).encode


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
        self._generators = Generators(device)
        # Where each buffer is, not what is there: a module may put another tensor in its place.
        self._buffers = [
            (f"buffer:{name}.{path}", table, key)
            for name, module in modules.items()
            for path, table, key in _kept_buffers(module)
        ]

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

    def versions(self) -> list[tuple[int, int]]:
        """Return what tells that a buffer was written or replaced, at the cost of a look at each."""
        return [(id(table[key]), table[key]._version) for _, table, key in self._buffers]

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
        for name, table, key in self._buffers:
            buffer, content = table[key], held.pop(name, None)
            if content is None or len(content) != buffer.nbytes:
                raise BadInput(f"the snapshot is of another model: {name[7:]} differs")
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
        return [(name, raw(table[key])) for name, table, key in self._buffers]


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


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, dict[str, torch.Tensor], str]]:
    """Return the buffers that a state_dict would hold: name, the table that has it, its key there."""
    kept = set(module.state_dict(keep_vars=True))
    found: dict[int, tuple[str, dict[str, torch.Tensor], str]] = {}  # one that two modules share once
    for path, each in module.named_modules():
        for key, buffer in each._buffers.items():
            name = f"{path}.{key}" if path else key
            if buffer is not None and name in kept:
                found.setdefault(id(buffer), (name, each._buffers, key))
    return list(found.values())
