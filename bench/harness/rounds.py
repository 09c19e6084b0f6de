"""Measure several calls in turns, so that changes in the machine's speed affect all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

UNCOUNTED = 2  # first rounds, which touch memory and fill caches for the first time


def take_turns(
    calls: Mapping[str, Callable[[], float | None]],
    repeats: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of `repeats` runs of each call, in rounds of one run each.

    A call returns its own seconds, or None when it could not be done. `between` runs before each call.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(repeats + UNCOUNTED):
        for name, call in calls.items():
            between()
            found = call()
            if found is not None and at >= UNCOUNTED:
                took[name].append(found)
    return took
