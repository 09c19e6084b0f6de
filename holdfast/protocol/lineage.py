"""Record which generation resumed from which step, to distinguish valid from void states. Pure.

A generation that resumes from step s voids the steps after s of older generations. An entry is redundant if a
later generation resumed from the same or a lower step, so the steps of a lineage increase with its
generations.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 256  # the most entries; no process still has a state that is older than the oldest of so many


@dataclass(frozen=True, slots=True)
class Lineage:
    """Generation `generation` resumed from `step`, so the later steps of older generations are void."""

    generation: int
    step: int


def valid(generation: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    """Return False if a later generation resumed from a lower step, so that this state is void."""
    return all(step <= later.step for later in lineage if later.generation > generation)


def extended(lineage: tuple[Lineage, ...], generation: int, step: int) -> tuple[Lineage, ...]:
    """Return `lineage` with a newer generation added, and without entries that it makes redundant."""
    needed = tuple(each for each in lineage if each.step < step)[1 - MOST :]
    return (*needed, Lineage(generation, step))


def merged(*lineages: tuple[Lineage, ...]) -> tuple[Lineage, ...]:
    """Merge lineages from several sources. If they differ, the first source takes precedence."""
    steps: dict[int, int] = {}
    for each in lineages:
        for entry in each:
            steps.setdefault(entry.generation, entry.step)
    found: tuple[Lineage, ...] = ()
    for generation, step in sorted(steps.items()):
        found = extended(found, generation, step)
    return found
