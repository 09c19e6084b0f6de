"""NumPy's global generator, the one behind `numpy.random.rand()`: read, set and seeded anew.

It is a Mersenne twister unless the program put another one there (`numpy.random.set_bit_generator`). A
twister's state is its words, as bytes; that of any other is what NumPy says of it, as JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast import twister
from holdfast.errors import BadInput, kind_of

TWISTER, OTHER = "numpy", "numpy:other"  # sections
_ARRAYS = ("uint8", "uint16", "uint32", "uint64")
_TAIL = struct.Struct("<q?d")  # position, is there a second Gaussian, which


class GlobalGenerator:
    """Reads it; a second Gaussian that is kept for the next call is no word of a twister."""

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
            self._seen = twister.copied(words) if words else words
        return TWISTER, self._packed

    def _look(self) -> memoryview:
        """Return the words; empty where they cannot be seen."""
        generator = _current(self._numpy)
        if generator is not self._generator:
            self._generator, self._is_twister = generator, _is_twister(generator)
            self._words = twister.at(generator.ctypes.state_address) if self._is_twister else memoryview(b"")
        return self._words


def restore(numpy: Any, sections: Mapping[str, bytes]) -> None:
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


def reseed(numpy: Any) -> None:
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
        raise BadInput(f"private state: {where} has {kind_of(found)} in its state, not numbers alone")

    return json.dumps(state, default=plain).encode()


def _array(numpy: Any, found: dict[str, Any]) -> Any:
    """Return an array for what `_described` has made of one."""
    dtype = next(iter(found), "")
    return numpy.array(found[dtype], dtype=dtype) if dtype in _ARRAYS else found
