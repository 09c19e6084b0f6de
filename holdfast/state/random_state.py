"""The state of every random generator that a script may use, read and set.

It is read several times in every step, between a model's passes, when no line of it or of this code is in a
cache. So what Python and NumPy make of it (tuples of 625 integers, copies) is only made again when the words
behind it have changed, and those are compared where they lie.
"""

from __future__ import annotations

import ctypes
import json
import random
import struct
import sys
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, type_with_article

if TYPE_CHECKING:
    import torch


Section = tuple[str, bytes]

_CUDA_BYTES = 16  # of the state of a CUDA generator: its seed and its offset
_PYTHON = struct.Struct("<625I?d")


class RandomGenerators:
    """Reads the generators of this process and, on a GPU, of `device`."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._on_gpu = device.type == "cuda"
        self._get_torch = torch.default_generator.get_state
        self._python = _Python()
        self._numpy: NumpyGenerator | None = None

    def read(self) -> list[Section]:
        """Return a name and the state of each."""
        state = self._get_torch()  # of the CPU, whole: `raw` would look
        words = ctypes.string_at(state.data_ptr(), state.nbytes)
        found = [("torch", words), ("python", self._python.read())]
        if self._numpy is None and "numpy" in sys.modules:
            self._numpy = NumpyGenerator(sys.modules["numpy"])
        if self._numpy is not None:
            found.append(self._numpy.read())
        if self._on_gpu:
            found.append(("cuda", self._gpu()))
        return found

    def _gpu(self) -> bytes:
        import torch

        return tensor_bytes(torch.cuda.get_rng_state(self._device))

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
            restore_numpy(sys.modules["numpy"], sections)
        if "cuda" in sections and self._device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(sections["cuda"]), self._device)


class _Python:
    """The module's own generator."""

    def __init__(self) -> None:
        self._instance: Any = getattr(random, "_inst", None)
        at = _words_of(self._instance)
        self._words = words_at(at) if at else None
        self._seen = memoryview(b"")
        self._kept: object = None  # the second Gaussian
        self._packed = b""

    def read(self) -> bytes:
        words = self._words
        if words is None:
            return _packed_python()
        if words != self._seen or self._instance.gauss_next != self._kept:
            self._packed = _packed_python()
            self._seen, self._kept = copy_of_words(words), self._instance.gauss_next
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
    if type(generator).__basicsize__ < head + WORDS * 4 or not hasattr(generator, "gauss_next"):
        return 0
    at = id(generator) + head
    position, *words = struct.unpack(f"={WORDS}I", ctypes.string_at(at, WORDS * 4))
    return at if (*words, position) == generator.getstate()[1] else 0


def is_generator_state(value: object) -> bool:
    """Say whether `value` is what `torch.Generator.get_state` gives, for the host or for CUDA."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        return False
    return value.device.type == "cpu" and value.numel() in (_host_bytes(), _CUDA_BYTES)


@cache
def _host_bytes() -> int:
    import torch

    return torch.Generator().get_state().numel()


def generator_state(content: bytes) -> torch.Tensor:
    """Return the state of a generator of torch whose bytes `raw` gave. Raises ValueError."""
    return _tensor(content)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
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


TWISTER, OTHER = "numpy", "numpy:other"  # sections
_ARRAYS = ("uint8", "uint16", "uint32", "uint64")
_TAIL = struct.Struct("<q?d")  # position, is there a second Gaussian, which


class NumpyGenerator:
    """Reads NumPy's global generator, the one behind `numpy.random.rand()`.

    It is a Mersenne twister unless the program put another one there (`numpy.random.set_bit_generator`). A
    twister's state is its words, as bytes, and a second Gaussian that is kept for the next call and is none
    of its words; the state of any other generator is what NumPy returns for it, as JSON.
    """

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._generator: Any = None
        self._is_twister = True
        self._words = memoryview(b"")  # where they lie, of this generator
        self._seen = memoryview(b"")
        self._packed = b""
        self._settled = False

    def read(self) -> tuple[str, bytes]:
        """Return the section's name and the state. Raises `BadInput` for a state that is not NumPy's own."""
        words = self._look()
        if not self._is_twister:
            return OTHER, _described(self._numpy)
        if not words or words != self._seen or not self._settled:
            _, keys, position, has, cached = self._numpy.random.get_state(legacy=True)
            tail = _TAIL.pack(int(position), bool(has), float(cached))
            self._packed, self._settled = bytes(keys.tobytes() + tail), not has
            self._seen = copy_of_words(words) if words else words
        return TWISTER, self._packed

    def _look(self) -> memoryview:
        """Return the words; empty where they cannot be seen."""
        generator = _current(self._numpy)
        if generator is not self._generator:
            self._generator, self._is_twister = generator, _is_twister(generator)
            self._words = words_at(generator.ctypes.state_address) if self._is_twister else memoryview(b"")
        return self._words


def restore_numpy(numpy: Any, sections: Mapping[str, bytes]) -> None:
    """Set it to where it was. Raises ValueError or TypeError for what is no state of the generator there."""
    if TWISTER in sections:
        content = sections[TWISTER]
        position, has, cached = _TAIL.unpack(content[-_TAIL.size :])
        keys = numpy.frombuffer(content[: -_TAIL.size], dtype=numpy.uint32).copy()
        _require(numpy, "MT19937")
        numpy.random.set_state(("MT19937", keys, position, int(has), cached))
    elif OTHER in sections:
        state = json.loads(sections[OTHER], object_hook=partial(_array, numpy))
        _require(numpy, state["bit_generator"])
        numpy.random.set_state(state)


def _require(numpy: Any, kind: Any) -> None:
    """NumPy's own words for this name the wrong one, or none."""
    here = type(_current(numpy) or numpy.random.MT19937()).__name__
    if here != kind:
        raise ValueError(f"NumPy's global generator is {here} here, and was {kind}")


def reseed_numpy(numpy: Any) -> None:
    """Seed it from the system, as in a process that has just started."""
    generator = _current(numpy)
    if generator is None or _is_twister(generator):
        numpy.random.seed()
    else:
        numpy.random.set_bit_generator(type(generator)())


def _current(numpy: Any) -> Any:
    """Return the bit generator; None where NumPy (before 1.24) does not show it, and has no other."""
    show = getattr(numpy.random, "get_bit_generator", None)
    return None if show is None else show()


def _is_twister(generator: Any) -> bool:
    return type(generator).__name__ == "MT19937"


def _described(numpy: Any) -> bytes:
    state = numpy.random.get_state(legacy=False)

    def plain(found: Any) -> Any:
        if isinstance(found, numpy.generic):
            return found.item()
        if isinstance(found, numpy.ndarray) and str(found.dtype) in _ARRAYS:
            return {str(found.dtype): found.tolist()}
        where = f"NumPy's global generator {state.get('bit_generator')!r}"
        raise BadInput(
            f"private state: {where} has {type_with_article(found)} in its state, not numbers alone"
        )

    return json.dumps(state, default=plain).encode()


def _array(numpy: Any, found: dict[str, Any]) -> Any:
    """Return an array for what `_described` has made of one."""
    dtype = next(iter(found), "")
    return numpy.array(found[dtype], dtype=dtype) if dtype in _ARRAYS else found


# A comparison of a twister's words where they lie shows in a microsecond that none of them has changed.
WORDS = 625  # 624 of state and a position


def words_at(address: int) -> memoryview:
    """Return the words at `address`, a live view; the caller must keep the generator alive."""
    return memoryview((ctypes.c_uint32 * WORDS).from_address(address)).cast("B").cast("I")


def copy_of_words(words: memoryview) -> memoryview:
    """Return the words as they are now."""
    return memoryview(bytes(words)).cast("I")
