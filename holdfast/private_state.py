"""A rank's private state as one small blob: random number generators, module buffers, data position.

It is written before every optimizer step and travels to another member, so it must be cheap: no
JSON of numbers, no names but a few. Buffers (batch norm's statistics) differ between the ranks of a DDP
group from one forward pass to the next, so they are private.
"""

from __future__ import annotations

import ctypes
import json
import random
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput

if TYPE_CHECKING:
    import torch

    from holdfast.guard import LossGuard

_MAGIC = b"HFPS\x01"
_SECTION = struct.Struct("<HQ")  # length of the name, length of the content
_PYTHON = struct.Struct("<625I?d")


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
        self._device = device
        self._buffers = [
            (f"buffer:{name}.{key}", buffer)
            for name, module in modules.items()
            for key, buffer in _kept_buffers(module)
        ]

    def collect(self) -> bytes:
        """Return the blob of this instant."""
        return self.blob(self.core())

    def blob(self, core: list[tuple[str, bytes]]) -> bytes:
        """Return the blob made of `core` as it was, and what the guard has learned since."""
        return b"".join([_MAGIC, *_framed(core), *_framed(self._learned())])

    def core(self) -> list[tuple[str, bytes]]:
        """Return all that must not change between the optimizer's first write and commit."""
        sections = [*self.random(), *self._buffer_sections()]
        if self._objects:
            state = {name: value.state_dict() for name, value in self._objects.items()}
            try:
                text = json.dumps(state, separators=(",", ":"))
            except TypeError as error:
                raise BadInput(f"state private to a rank must be JSON: {error}") from None
            sections.append(("objects", text.encode()))
        return sections

    def _learned(self) -> list[tuple[str, bytes]]:
        """Return what the guard knows: of the steps before, its window of losses."""
        if self._guard is None:
            return []
        return [(f"guard:{k}", array("d", v).tobytes()) for k, v in self._guard.state().items()]

    def random(self) -> list[tuple[str, bytes]]:
        """Return the state of every generator that a script may use."""
        import torch

        found = [("torch", _raw(torch.get_rng_state())), ("python", _python_state())]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found.append(("numpy", _numpy_state(numpy)))
        if self._device.type == "cuda":
            found.append(("cuda", _raw(torch.cuda.get_rng_state(self._device))))
        return found

    def fingerprint(self) -> tuple[object, ...]:
        """Return what changes when a generator is drawn from: a fraction of the cost of `random`."""
        import torch

        numpy = sys.modules.get("numpy")
        drawn = (_raw(torch.get_rng_state()), random.getstate(), _numpy_words(numpy) if numpy else b"")
        if self._device.type == "cuda":
            return (*drawn, _raw(torch.cuda.get_rng_state(self._device)))
        return drawn

    def restore(self, blob: bytes) -> dict[str, bytes]:
        """Put buffers and objects back; return the sections, for `restore_random` later.

        Raises `BadInput` when the blob is of another model.
        """
        import torch

        sections = parse(blob)
        held = {name: content for name, content in sections.items() if name.startswith("buffer:")}
        for name, buffer in self._buffers:
            content = held.pop(name, None)
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
        learned = {k: array("d") for k in self._guard.state()}
        try:
            for name, values in learned.items():
                values.frombytes(sections.get(f"guard:{name}", b""))
            self._guard.restore({name: values.tolist() for name, values in learned.items()})
        except ValueError as error:
            raise BadInput(f"private state: {error}") from None

    def restore_random(self, sections: Mapping[str, bytes]) -> None:
        """Set every generator to where it was. Raises `BadInput` when one cannot be."""
        try:
            self._restore_random(sections)
        except (ValueError, TypeError, LookupError, RuntimeError, OverflowError, struct.error) as error:
            raise BadInput(f"private state: a random generator cannot take its state: {error}") from None

    def _restore_random(self, sections: Mapping[str, bytes]) -> None:
        import torch

        if "torch" in sections:
            torch.set_rng_state(_tensor(sections["torch"]))
        if "python" in sections:
            *words, has, cached = _PYTHON.unpack(sections["python"])
            random.setstate((3, tuple(words), cached if has else None))
        numpy = sys.modules.get("numpy")
        if "numpy" in sections and numpy is not None:
            _restore_numpy(numpy, sections["numpy"])
        if "cuda" in sections and self._device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(sections["cuda"]), self._device)

    def _buffer_sections(self) -> list[tuple[str, bytes]]:
        return [(name, _raw(buffer)) for name, buffer in self._buffers]


def _framed(sections: list[tuple[str, bytes]]) -> list[bytes]:
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


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that the module's state_dict would hold."""
    kept = set(module.state_dict(keep_vars=True))
    return [(key, buffer) for key, buffer in module.named_buffers() if key in kept]


def _raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _tensor(content: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _python_state() -> bytes:
    _, words, cached = random.getstate()
    return _PYTHON.pack(*words, cached is not None, cached or 0.0)


def _numpy_state(numpy: Any) -> bytes:
    _, keys, position, has, cached = numpy.random.get_state(legacy=True)
    return bytes(keys.tobytes() + struct.pack("<q?d", int(position), bool(has), float(cached)))


def _numpy_words(numpy: Any) -> bytes:
    """Read the global generator's words (624 and a position) where they lie; NumPy >= 1.24 shows them."""
    generator = getattr(numpy.random, "get_bit_generator", None)
    if generator is None:
        return _numpy_state(numpy)
    return ctypes.string_at(generator().ctypes.state_address, 625 * 4)


def _restore_numpy(numpy: Any, content: bytes) -> None:
    position, has, cached = struct.unpack("<q?d", content[-17:])
    keys = numpy.frombuffer(content[:-17], dtype=numpy.uint32).copy()
    numpy.random.set_state(("MT19937", keys, position, int(has), cached))
