"""The words of a Mersenne twister where they lie: to see in a microsecond that none of them has changed."""

from __future__ import annotations

import ctypes

WORDS = 625  # 624 of state and a position


def at(address: int) -> memoryview:
    """Return the words at `address`, which change as the generator draws; whoever looks keeps it alive."""
    return memoryview((ctypes.c_uint32 * WORDS).from_address(address)).cast("B").cast("I")


def copied(words: memoryview) -> memoryview:
    """Return the words as they are now."""
    return memoryview(bytes(words)).cast("I")
