"""The limits on the stored evidence, by kind of entity, and what makes room for more. Pure.

Each kind has its own limits, so the disks of a thousand pods never take a GPU's place. The hardware bounds
the number of GPUs and switches, so their limits are out of reach; they only matter if a broken driver makes
up more. Evidence of a current finding is never given up, and refusals are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from nodeagent.evaluation.bursts import EventBursts
from nodeagent.model import DRIVER, NODE, kind_of
from nodeagent.policy.rules import Clears, Meaning

MAX_SERIES = (
    2048  # of one kind of entity; a node has at most some 250 pods, with three series for each volume
)
MAX_EVENTS = 2048
MAX_OWN = 16384  # the same for the node's own hardware: 64 GPUs with 256 codes each
MAX_VARIANTS = 16
GONE_S = 900.0  # after this long without a sample, the entity is gone: all periods are shorter
Key = TypeVar("Key", bound=tuple[Any, ...])
SEARCH_EVERY_S = 1.0  # for something to give up, once nothing was found
OWN = ("gpu", NODE, DRIVER, "nvswitch", "sensor")


def series_limit(kind: str) -> int:
    return MAX_OWN if kind in OWN else MAX_SERIES


def event_limit(kind: str) -> int:
    return MAX_OWN if kind in OWN else MAX_EVENTS


def full_pool(stored: Collection[Key], entity: str, limit_of: Callable[[str], int]) -> tuple[int, list[Key]]:
    """Return how much to give up before another can be stored, 0 if there is room, and the candidates.

    A part of the limit is freed at once, to spare a flood the search for each observation.
    """
    kind = kind_of(entity)
    limit = limit_of(kind)
    if len(stored) < limit:
        return 0, []
    pool = [each for each in stored if kind_of(each[0]) == kind]
    return (max(1, limit // 16), pool) if len(pool) >= limit else (0, [])


def drop_variant(variants: dict[str, EventBursts], meaning: Callable[[str], Meaning]) -> None:
    """Drop the variant with the mildest meaning, of those the one last seen longest ago.

    If another variant means the same, it takes over the bursts, and the finding keeps its age.
    """

    def gravity(name: str) -> tuple[int, int, int]:
        meant = meaning(name)
        return meant.level, meant.action, list(Clears).index(meant.clears)

    victim = min(variants, key=lambda name: (gravity(name), variants[name].last_s, name))
    dropped, meant = variants.pop(victim), meaning(victim)
    heirs = [name for name in variants if meaning(name) == meant]
    if heirs and not (meant.recurs and meant.recurs.same_variant):
        variants[max(heirs, key=lambda name: (variants[name].last_s, name))].join(dropped)
