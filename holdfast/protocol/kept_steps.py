"""Choose the steps whose private states are kept: all recent steps, and fewer and fewer older steps.

The kept older steps are spaced like the marks of a ruler. A step's place depends on its number of trailing
zero bits and on the bit above its lowest set bit. A step therefore replaces only the step 2^(zeros + 2)
before it. As a result, these steps are always kept:

- the last two steps with each number of trailing zeros,
- the last three consecutive steps, even while the next one is being written,
- the last four multiples of any power of two up to 2^19.

Steps divisible by `every` have four additional places. Large states have places only for the last four steps.

There are also places for pinned states of any step, because the group may resume from them (see
`holdfast.snapshot.private_store`).
"""

from __future__ import annotations

LEVELS = 20  # all multiples of 2^19 share the last level
RULER_PLACES = 1 + 2 * LEVELS
EVERY_PLACES = 4
FEW_PLACES = 4
# Two for the snapshots in the slots, and two for the earlier snapshots that a slower member may still have.
PIN_PLACES = 4


def count(every: int, few: bool = False) -> int:
    """Return the number of places, with `few` for large states.

    The last `PIN_PLACES` places are for pinned states and do not belong to any step.
    """
    return (FEW_PLACES if few else RULER_PLACES + (EVERY_PLACES if every else 0)) + PIN_PLACES


def places(step: int, every: int, few: bool = False) -> tuple[int, ...]:
    """Return the places of `step`, which is at least 0. Every step has at least one place.

    If `every` is 0, there are no additional places.
    """
    if few:
        return (step % FEW_PLACES,)
    if step == 0:
        ruler = 0  # a separate level for the first state of a run
    else:
        level = min((step & -step).bit_length(), LEVELS) - 1
        ruler = 1 + 2 * level + ((step >> (level + 1)) & 1)
    if every and step % every == 0:
        return ruler, RULER_PLACES + (step // every) % EVERY_PLACES
    return (ruler,)
