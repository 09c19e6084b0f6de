"""The state of every random generator that a script may use, read and set.

It is read several times in every step, between a model's passes, when no line of it or of this code is in a
cache. So what Python and NumPy make of it (tuples of 625 integers, copies) is only made anew when the words
behind it have changed, and those are compared where they lie.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast import numpy_random, twister
from holdfast.errors import BadInput
from holdfast.numpy_random import GlobalGenerator

if TYPE_CHECKING:
    import torch

Section = tuple[str, bytes]

_CUDA_BYTES = 16  # of the state of a CUDA generator: its seed and its offset
_PYTHON = struct.Struct("<625I?d")


class Generators:
    """Reads the generators of this process and, on a GPU, of `device`."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._on_gpu = device.type == "cuda"
        self._get_torch = torch.default_generator.get_state
        self._python = _Python()
        self._numpy: GlobalGenerator | None = None

    def read(self) -> list[Section]:
        """Return a name and the state of each."""
        state = self._get_torch()  # of the CPU, whole: `raw` would look
        words = ctypes.string_at(state.data_ptr(), state.nbytes)
        found = [("torch", words), ("python", self._python.read())]
        if self._numpy is None and "numpy" in sys.modules:
            self._numpy = GlobalGenerator(sys.modules["numpy"])
        if self._numpy is not None:
            found.append(self._numpy.read())
        if self._on_gpu:
            found.append(("cuda", self._gpu()))
        return found

    def _gpu(self) -> bytes:
        import torch

        return raw(torch.cuda.get_rng_state(self._device))

    def restore(self, sections: Mapping[str, bytes]) -> None:
        """Set every generator to where it was. Raises `BadInput` when one cannot be."""
        try:
            self._restore(sections)
        except (ValueError, TypeError, LookupError, RuntimeError, OverflowError, struct.error) as error:
            raise BadInput(f"private state: a random generator cannot take its state: {error}") from None

    def _restore(self, sections: Mapping[str, bytes]) -> None:
        import torch

        if "torch" in sections:
            torch.set_rng_state(_tensor(sections["torch"]))
        if "python" in sections:
            *words, has, cached = _PYTHON.unpack(sections["python"])
            random.setstate((3, tuple(words), cached if has else None))
        if "numpy" in sys.modules:
            numpy_random.restore(sys.modules["numpy"], sections)
        if "cuda" in sections and self._device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(sections["cuda"]), self._device)


class _Python:
    """The module's own generator."""

    def __init__(self) -> None:
        self._instance: Any = getattr(random, "_inst", None)
        at = _words_of(self._instance)
        self._words = twister.at(at) if at else None
        self._seen = memoryview(b"")
        self._kept: object = None  # the second Gaussian
        self._packed = b""

    def read(self) -> bytes:
        words = self._words
        if words is None:
            return _packed_python()
        if words != self._seen or self._instance.gauss_next != self._kept:
            self._packed = _packed_python()
            self._seen, self._kept = twister.copied(words), self._instance.gauss_next
        return self._packed


def _packed_python() -> bytes:
    _, words, cached = random.getstate()
    return _PYTHON.pack(*words, cached is not None, cached or 0.0)


def _words_of(generator: Any) -> int:
    """Return the address of what changes with every draw from a `random.Random`; 0: not found.

    In CPython 3.10 to 3.13 the object's head is followed by the position and 624 words. Whatever else
    they may be elsewhere, they are used only if they are what getstate() says.
    """
    if sys.implementation.name != "cpython" or not isinstance(generator, random.Random):
        return 0
    head = object.__basicsize__
    if type(generator).__basicsize__ < head + twister.WORDS * 4 or not hasattr(generator, "gauss_next"):
        return 0
    at = id(generator) + head
    position, *words = struct.unpack(f"={twister.WORDS}I", ctypes.string_at(at, twister.WORDS * 4))
    return at if (*words, position) == generator.getstate()[1] else 0


def is_state(value: object) -> bool:
    """Say whether `value` is what `torch.Generator.get_state` gives, for the host or for CUDA."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        return False
    return value.device.type == "cpu" and value.numel() in (_host_bytes(), _CUDA_BYTES)


@cache
def _host_bytes() -> int:
    import torch

    return torch.Generator().get_state().numel()


def state_from(content: bytes) -> torch.Tensor:
    """Return the state of a generator of torch whose bytes `raw` gave. Raises ValueError."""
    return _tensor(content)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, in its order."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # its memory has the numbers without their sign
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _tensor(content: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
