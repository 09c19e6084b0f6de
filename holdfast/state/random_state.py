"""Read and set the state of every random generator that a script may use.

The states are read several times per step, each time with cold CPU caches. Python returns a state as a tuple
of 625 integers, and NumPy returns a copy. Both are slow to build. So the generator's words are first compared
in place with the words of the last result, and a new result is built only if they have changed.
"""

from __future__ import annotations

import ctypes
import hashlib
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

_CUDA_BYTES = 16  # the size of a CUDA generator's state: its seed and its offset
_PYTHON = struct.Struct("<625I?d")
_TRIAL_SEED = 20_110_503
# In the result of `get_state()`, the words follow the seed, the position and a flag.
_TORCH_WORDS_AT = 24
_TORCH_SEARCHED = 2624  # no more than the size of a generator
_TORCH_BEFORE, _TORCH_AFTER = 20, 28  # the state's bytes before and after the words


class RandomGenerators:
    """Reads and restores the generators of this process and, if `device` is a GPU, that GPU's generator."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._on_gpu = device.type == "cuda"
        self._torch = TorchGenerator(torch.default_generator)
        self._python = _Python()
        self._numpy: NumpyGenerator | None = None

    def read(self) -> list[Section]:
        """Return the name and state of each generator."""
        found = [("torch", self._torch.read()), ("python", self._python.read())]
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
        """Set every generator to its saved state. Raises `BadInput` if a generator refuses its state."""
        try:
            self._restore(sections)
        except (ValueError, TypeError, LookupError, RuntimeError, OverflowError, struct.error) as error:
            raise BadInput(f"private state: a random generator cannot load its state: {error}") from None

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

    def seed(self, what: object) -> None:
        """Seed every generator with a hash of `what`, which must have the same `repr` in each process."""
        import torch

        seed = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class TorchGenerator:
    """Reads one of torch's generators on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        region = _region_of_torch()
        self._live = memoryview(b"")  # a view of the generator's memory; empty if its layout is unknown
        if region is not None:
            self._live = _view(_address(generator) + region[0], region[1])
        self._seen = memoryview(b"")
        self._packed = b""

    def read(self) -> bytes:
        """Return the bytes of the generator's `get_state()`."""
        live = self._live
        if not live or live != self._seen:
            # Copy first: if another thread draws a number now, the next call finds a difference.
            self._seen = memoryview(bytes(live)).cast("Q")
            # This tensor is contiguous and on the CPU, so it does not need the checks in `tensor_bytes`.
            state = self._generator.get_state()
            self._packed = ctypes.string_at(state.data_ptr(), state.nbytes)
        return self._packed


def _address(generator: torch.Generator) -> int:
    return int(getattr(generator, "_cdata", 0))


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B").cast("Q")


@cache
def _region_of_torch() -> tuple[int, int] | None:
    """Return where torch keeps a generator's state: the offset in the generator, and the size in bytes.

    There, torch keeps the seed, the position, 624 words, and the second Gaussians of both precisions. The
    layout is not documented, so it is tried on another generator. The result is None if that generator's
    memory does not contain the words, or does not change whenever its state does.
    """
    import torch

    trial = torch.Generator("cpu")
    trial.manual_seed(_TRIAL_SEED)
    state = tensor_bytes(trial.get_state())
    if not _address(trial) or len(state) < _TORCH_WORDS_AT + (WORDS - 1) * 8:
        return None
    words = [word & 0xFFFFFFFF for word in struct.unpack_from(f"<{WORDS - 1}Q", state, _TORCH_WORDS_AT)]
    content = ctypes.string_at(_address(trial), _TORCH_SEARCHED)
    at = content.find(struct.pack(f"<{WORDS - 1}I", *words))
    if at < _TORCH_BEFORE:
        return None
    region = at - _TORCH_BEFORE, _TORCH_BEFORE + (WORDS - 1) * 4 + _TORCH_AFTER
    view = _view(_address(trial) + region[0], region[1])
    empty = torch.empty(1, dtype=torch.float64, device="cpu")
    for draw in (
        lambda: empty.uniform_(generator=trial),
        lambda: empty.normal_(generator=trial),
        lambda: empty.normal_(generator=trial),  # returns the second Gaussian
        lambda: empty.float().normal_(generator=trial),
        lambda: empty.float().normal_(generator=trial),
        lambda: trial.manual_seed(_TRIAL_SEED + 1),
    ):
        before, state = bytes(view), tensor_bytes(trial.get_state())
        draw()
        if (bytes(view) == before) != (tensor_bytes(trial.get_state()) == state):
            return None
    return region


class _Python:
    """Reads the global generator of Python's `random` module."""

    def __init__(self) -> None:
        self._instance: Any = getattr(random, "_inst", None)
        at = _words_of(self._instance)
        self._words = words_at(at) if at else None
        self._seen = memoryview(b"")
        self._kept: object = None  # the second Gaussian, which `random` stores for its next call
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
    """Return the address of a `random.Random`'s state; 0 if unknown.

    In CPython 3.10 to 3.13, the position and 624 words follow the object's header. Other versions may use
    another layout, so the address is returned only if `getstate()` returns the same words.
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
    """Return whether `value` looks like a result of `torch.Generator.get_state`, for the CPU or for CUDA."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        return False
    return value.device.type == "cpu" and value.numel() in (_host_bytes(), _CUDA_BYTES)


@cache
def _host_bytes() -> int:
    import torch

    return torch.Generator().get_state().numel()


def generator_state(content: bytes) -> torch.Tensor:
    """Return a torch generator's state, given its `tensor_bytes`. Raises ValueError if they are empty."""
    return _tensor(content)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in row-major order."""
    tensor = tensor.detach()
    # Conjugation and negation are lazy: the memory still contains the original values.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _tensor(content: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


TWISTER, OTHER = "numpy", "numpy:other"  # section names
_ARRAYS = ("uint8", "uint16", "uint32", "uint64")
_TAIL = struct.Struct("<q?d")  # the position, whether a second Gaussian is stored, and its value


class NumpyGenerator:
    """Reads NumPy's global generator, which functions such as `numpy.random.rand()` use.

    It is a Mersenne twister, unless the program has replaced it with `numpy.random.set_bit_generator`. A
    twister's state is encoded as the bytes of its words, its position, and the second Gaussian, which NumPy
    stores for its next call. The state of any other generator is encoded as JSON.
    """

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._generator: Any = None
        self._is_twister = True
        self._words = memoryview(b"")  # a view of the generator's memory
        self._seen = memoryview(b"")
        self._packed = b""
        self._settled = False

    def read(self) -> tuple[str, bytes]:
        """Return the name of the section and the state.

        Raises `BadInput` if the state contains values other than numbers, strings and arrays of unsigned
        integers.
        """
        words = self._view()
        if not self._is_twister:
            return OTHER, _described(self._numpy)
        if not words or words != self._seen or not self._settled:
            _, keys, position, has, cached = self._numpy.random.get_state(legacy=True)
            tail = _TAIL.pack(int(position), bool(has), float(cached))
            self._packed, self._settled = bytes(keys.tobytes() + tail), not has
            self._seen = copy_of_words(words) if words else words
        return TWISTER, self._packed

    def _view(self) -> memoryview:
        """Return a live view of the generator's words. It is empty if the words are not accessible."""
        generator = _current(self._numpy)
        if generator is not self._generator:
            self._generator, self._is_twister = generator, _is_twister(generator)
            self._words = words_at(generator.ctypes.state_address) if self._is_twister else memoryview(b"")
        return self._words


def restore_numpy(numpy: Any, sections: Mapping[str, bytes]) -> None:
    """Set NumPy's global generator to its saved state.

    Raises ValueError or TypeError if the state does not fit the current generator.
    """
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
    """Raise ValueError unless the global generator is of this `kind`.

    NumPy makes the same check, but its message may name the wrong type.
    """
    here = type(_current(numpy) or numpy.random.MT19937()).__name__
    if here != kind:
        raise ValueError(f"NumPy's global generator is {here} now, but was {kind}")


def reseed_numpy(numpy: Any) -> None:
    """Seed NumPy's global generator from the operating system, as in a process that has just started."""
    generator = _current(numpy)
    if generator is None or _is_twister(generator):
        numpy.random.seed()
    else:
        numpy.random.set_bit_generator(type(generator)())


def _current(numpy: Any) -> Any:
    """Return the bit generator; None before NumPy 1.24, where it is always a twister."""
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
            f"private state: the state of {where} contains {type_with_article(found)}, which cannot be saved"
        )

    return json.dumps(state, default=plain).encode()


def _array(numpy: Any, found: dict[str, Any]) -> Any:
    """Return the array that `_described` encoded as `found`; return any other dict unchanged."""
    dtype = next(iter(found), "")
    return numpy.array(found[dtype], dtype=dtype) if dtype in _ARRAYS else found


# These functions give direct access to a Mersenne Twister's state, so it can be compared in about a
# microsecond.
WORDS = 625  # 624 words of state and a position


def words_at(address: int) -> memoryview:
    """Return a live view of the words at `address`. The caller must keep the generator alive."""
    return memoryview((ctypes.c_uint32 * WORDS).from_address(address)).cast("B").cast("I")


def copy_of_words(words: memoryview) -> memoryview:
    """Return a copy of the words."""
    return memoryview(bytes(words)).cast("I")
