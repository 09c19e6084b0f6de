"""Which steps' private states are kept: close ones all, far ones like the marks of a ruler.

A step's place is the number of its trailing zero bits and the one bit above them. So a step
replaces the one 2^(zeros + 2) before it and nothing else, and what is always held is: the last
two steps with each number of trailing zeros, the last three steps in a row even while the next
is written, the last four multiples of any power of two up to 2^19. Steps divisible by `every`
have four more places of their own.

States that are large have a place for each of the last four steps instead.

There are also places for what the group may resume from, whatever its step: see
`holdfast.snapshot.private_store`.
"""

from __future__ import annotations

LEVELS = 20  # multiples of 2^19 share the last one
RULER_PLACES = 1 + 2 * LEVELS
EVERY_PLACES = 4
FEW_PLACES = 4
PIN_PLACES = 4  # two slots, and the two before them: a member that is behind another may hold these


def count(every: int, few: bool = False) -> int:
    """Return how many places there are, of large states if `few`. The last `PIN_PLACES` are no step's own."""
    return (FEW_PLACES if few else RULER_PLACES + (EVERY_PLACES if every else 0)) + PIN_PLACES


def places(step: int, every: int, few: bool = False) -> tuple[int, ...]:
    """Return the places of `step` >= 0; the first is one that every step has. `every` is 0 for off."""
    if few:
        return (step % FEW_PLACES,)
    if step == 0:
        ruler = 0  # its own: the state that a run starts from
    else:
        level = min((step & -step).bit_length(), LEVELS) - 1
        ruler = 1 + 2 * level + ((step >> (level + 1)) & 1)
    if every and step % every == 0:
        return ruler, RULER_PLACES + (step // every) % EVERY_PLACES
    return (ruler,)
