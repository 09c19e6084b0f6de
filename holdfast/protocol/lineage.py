"""Record which generation resumed from which step, to tell valid states from void ones. Pure.

If a generation resumes from step s, all steps after s of older generations become void. An entry is redundant
if a later generation resumed from the same or a lower step. In a lineage without redundant entries, the steps
increase with the generations.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 256  # the maximum number of entries; no process has a state older than that many resumptions


@dataclass(frozen=True, slots=True)
class Lineage:
    """Generation `generation` resumed from `step`, so the later steps of older generations are void."""

    generation: int
    step: int


def valid(generation: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    """Return False if this state is void, because a later generation resumed from a lower step."""
    return all(step <= later.step for later in lineage if later.generation > generation)


def extended(lineage: tuple[Lineage, ...], generation: int, step: int) -> tuple[Lineage, ...]:
    """Return `lineage` with a newer generation added, and without entries that it makes redundant."""
    needed = tuple(each for each in lineage if each.step < step)[1 - MOST :]
    return (*needed, Lineage(generation, step))


def merged(*lineages: tuple[Lineage, ...]) -> tuple[Lineage, ...]:
    """Merge lineages from several sources. If they disagree, earlier sources take precedence."""
    steps: dict[int, int] = {}
    for each in lineages:
        for entry in each:
            steps.setdefault(entry.generation, entry.step)
    found: tuple[Lineage, ...] = ()
    for generation, step in sorted(steps.items()):
        found = extended(found, generation, step)
    return found
