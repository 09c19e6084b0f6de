"""Measure several calls, interleaved, so that changes in the machine's speed affect all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

UNCOUNTED = 2  # rounds at the start that do not count, because they touch memory for the first time


def take_turns(
    calls: Mapping[str, Callable[[], float | None]],
    repeats: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds that `repeats` runs of each call took, in rounds of one run each.

    A call returns the seconds that it took, or None if it could not be done. `between` runs before each call.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(repeats + UNCOUNTED):
        for name, call in calls.items():
            between()
            found = call()
            if found is not None and at >= UNCOUNTED:
                took[name].append(found)
    return took
