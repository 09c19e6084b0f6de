"""Which steps' private states are kept: close ones all, far ones like the marks of a ruler.

A step's place is the number of its trailing zero bits and the one bit above them. So a step
replaces the one 2^(zeros + 2) before it and nothing else, and what is always held is: the last
two steps with each number of trailing zeros, the last three steps in a row even while the next
is written, the last four multiples of any power of two up to 2^19. Steps divisible by `every`
have four more places of their own.
"""

from __future__ import annotations

LEVELS = 20  # multiples of 2^19 share the last one
RULER_PLACES = 1 + 2 * LEVELS
EVERY_PLACES = 4


def count(every: int) -> int:
    """Return how many places there are."""
    return RULER_PLACES + (EVERY_PLACES if every else 0)


def places(step: int, every: int) -> tuple[int, ...]:
    """Return the places of `step` >= 0. `every` is 0 for off."""
    if step == 0:
        ruler = 0  # its own: the state that a run starts from
    else:
        level = min((step & -step).bit_length(), LEVELS) - 1
        ruler = 1 + 2 * level + ((step >> (level + 1)) & 1)
    if every and step % every == 0:
        return ruler, RULER_PLACES + (step // every) % EVERY_PLACES
    return (ruler,)
