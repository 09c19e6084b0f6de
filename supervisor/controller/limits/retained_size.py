"""Compute how much memory decoded values take. Pure."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, cast, get_type_hints

# The most memory that a value takes within a list or an object, in addition to the characters of a text.
VALUE_BYTES = 72
# The most memory that an object takes, not including its mandatory values, which are counted as values.
OBJECT_BYTES = 192
WIDE = 4  # bytes for each character of a text that contains one outside of ASCII
WIDE_TEXT_BYTES = 32  # the additional size of such a text
NUMBER_BYTES = 40  # an integer of 64 bits, rounded up; a float takes less
_GC_BYTES = 16  # what the garbage collector adds to an object that it examines
_NUMBERS = frozenset({int, float, bool})


def most_bytes(text: str) -> int:
    """Return a bound on the memory of the values in `text`, which is JSON in ASCII. This takes 1 us per KB.

    Every value except the first in a list or an object follows a comma.
    """
    values = text.count(",") * VALUE_BYTES + text.count("{") * OBJECT_BYTES
    escapes = text.count("\\u") if "\\" in text else 0  # most reports have none, which is quick to check
    return len(text) * (WIDE if escapes else 1) + escapes * WIDE_TEXT_BYTES + values


def retained_bytes(value: Any, texts: bool = True) -> int:
    """Return a bound on the memory that a decoded value takes, including all values in it.

    If `texts` is false, this is the memory of a copy that shares the texts. A value that occurs more than
    once is counted each time.
    """
    kind = type(value)
    if kind is str:
        return _rounded(sys.getsizeof(value)) if texts else 0
    if kind is tuple:
        return _rounded(sys.getsizeof(value) + _GC_BYTES) + _items_bytes(value, texts) if value else 0
    if kind in _NUMBERS:
        return NUMBER_BYTES
    if value is None:
        return 0
    own_bytes, others = _object(cast("Hashable", kind))
    return own_bytes + sum([retained_bytes(getattr(value, name), texts) for name in others])


def _items_bytes(items: tuple[Any, ...], texts: bool) -> int:
    kind = type(items[0])
    if kind in _NUMBERS:
        return NUMBER_BYTES * len(items)
    own_bytes, others = _object(kind) if is_dataclass(kind) else (0, ("",))
    if not others:
        return own_bytes * len(items)
    return sum([retained_bytes(each, texts) for each in items])


@lru_cache(maxsize=256)
def _object(kind: Any) -> tuple[int, tuple[str, ...]]:
    """Return the size of an instance of a dataclass with its numbers, and the names of its other fields."""
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind)]
    others = tuple(name for name in names if hints[name] not in _NUMBERS)
    own_bytes = _rounded(object.__sizeof__(object()) + 8 * len(names) + _GC_BYTES)
    return own_bytes + NUMBER_BYTES * (len(names) - len(others)), others


def _rounded(size: int) -> int:
    """Return how many bytes the allocator uses for `size` bytes."""
    return (size + 15) & ~15
