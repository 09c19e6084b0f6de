"""Record which generation resumed from which step, to separate valid states from void ones. Pure.

A generation that resumes from step s voids the steps that older generations did beyond s. A later entry at or
below an entry's step implies that entry, so the steps of a lineage increase with its generations.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 256  # entries; no state older than that many entries is held anywhere


@dataclass(frozen=True, slots=True)
class Lineage:
    """Generation `generation` resumed from `step`: the steps of older generations beyond it are void."""

    generation: int
    step: int


def valid(generation: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    """False when a later generation resumed from before that step."""
    return all(step <= later.step for later in lineage if later.generation > generation)


def extended(lineage: tuple[Lineage, ...], generation: int, step: int) -> tuple[Lineage, ...]:
    """Return `lineage` with a newer generation, without the entries that it implies."""
    needed = tuple(each for each in lineage if each.step < step)[1 - MOST :]
    return (*needed, Lineage(generation, step))


def merged(*lineages: tuple[Lineage, ...]) -> tuple[Lineage, ...]:
    """Merge histories from multiple sources; where they differ, the first source takes precedence."""
    steps: dict[int, int] = {}
    for each in lineages:
        for entry in each:
            steps.setdefault(entry.generation, entry.step)
    found: tuple[Lineage, ...] = ()
    for generation, step in sorted(steps.items()):
        found = extended(found, generation, step)
    return found
