"""Which generation resumed from which step: it separates states that count from those that are void. Pure.

A generation that resumes from step s makes void what older generations did beyond s. An entry is implied by
a later one at or below its step, so the steps of a lineage rise with its generations.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 256  # entries; beyond it nothing of that age is held anywhere


@dataclass(frozen=True, slots=True)
class Lineage:
    """Generation `generation` resumed from `step`: what older ones did beyond it is void."""

    generation: int
    step: int


def valid(generation: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    """False when a later generation resumed from before that step."""
    return all(step <= later.step for later in lineage if later.generation > generation)


def extended(lineage: tuple[Lineage, ...], generation: int, step: int) -> tuple[Lineage, ...]:
    """Return `lineage` with a newer generation, without what that implies."""
    needed = tuple(each for each in lineage if each.step < step)[1 - MOST :]
    return (*needed, Lineage(generation, step))


def merged(*lineages: tuple[Lineage, ...]) -> tuple[Lineage, ...]:
    """Return one history from several sources; where they differ, the first of them is right."""
    steps: dict[int, int] = {}
    for each in lineages:
        for entry in each:
            steps.setdefault(entry.generation, entry.step)
    found: tuple[Lineage, ...] = ()
    for generation, step in sorted(steps.items()):
        found = extended(found, generation, step)
    return found
