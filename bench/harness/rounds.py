"""Measure several things side by side, so that the machine's moods hit all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

UNCOUNTED = 2  # rounds before: memory is touched and caches are filled for the first time


def take_turns(
    calls: Mapping[str, Callable[[], float | None]],
    repeats: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of `repeats` calls of each, one after the other in rounds.

    A call gives its own seconds, or None when it could not be done. Before each call comes `between`.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(repeats + UNCOUNTED):
        for name, call in calls.items():
            between()
            found = call()
            if found is not None and at >= UNCOUNTED:
                took[name].append(found)
    return took
