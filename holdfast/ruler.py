"""Which steps' private states are kept: close ones all, far ones like the marks of a ruler.

A step's place is the number of its trailing zero bits and the one bit above them. So a step
replaces the one 2^(zeros + 2) before it and nothing else, and what is always held is: the last
two steps with each number of trailing zeros, the last three steps in a row even while the next
is written, the last four multiples of any power of two up to 2^19. Steps divisible by `every`
have four more places of their own, and each step that is pinned has one.

States that are large have a few places only: the last three steps in a row even while the next is
written, the last two steps divisible by `every`, and those that are pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

LEVELS = 20  # multiples of 2^19 share the last one
RULER_PLACES = 1 + 2 * LEVELS
EVERY_PLACES = 4
PIN_PLACES = 2
FEW_PLACES = 4
FEW_EVERY_PLACES = 2


def count(every: int, few: bool = False) -> int:
    """Return how many places there are, of large states if `few`."""
    if few:
        return FEW_PLACES + PIN_PLACES + FEW_EVERY_PLACES
    return RULER_PLACES + PIN_PLACES + (EVERY_PLACES if every else 0)


def places(step: int, every: int, pins: Sequence[int] = (), few: bool = False) -> tuple[int, ...]:
    """Return the places of `step` >= 0; the first is the one that every step has. `every` is 0 for off.

    `pins` are at most `PIN_PLACES` steps, each with a place of its own.
    """
    first, many = _of_few(step, every) if few else _of_ruler(step, every)
    begin = FEW_PLACES if few else RULER_PLACES
    return (*first, *(begin + place for place, pin in enumerate(pins[:PIN_PLACES]) if pin == step), *many)


def _of_few(step: int, every: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if every and step % every == 0:
        return (step % FEW_PLACES,), (FEW_PLACES + PIN_PLACES + (step // every) % FEW_EVERY_PLACES,)
    return (step % FEW_PLACES,), ()


def _of_ruler(step: int, every: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if step == 0:
        ruler = 0  # its own: the state that a run starts from
    else:
        level = min((step & -step).bit_length(), LEVELS) - 1
        ruler = 1 + 2 * level + ((step >> (level + 1)) & 1)
    if every and step % every == 0:
        return (ruler,), (RULER_PLACES + PIN_PLACES + (step // every) % EVERY_PLACES,)
    return (ruler,), ()
