"""The limits on the stored evidence, by kind of entity, and the evidence to drop at a limit. Pure.

Each kind has its own limits, so the disks of a thousand pods never displace a GPU's evidence. The hardware
bounds the number of GPUs and switches, so their limits are reached only if a broken driver invents more.
Evidence of a current finding is dropped only for more severe evidence, and evidence of an unhealthy finding
is never dropped. Refusals and losses are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nodeagent.evaluation.bursts import NEVER_OFF, Burst, EventBursts, TimeOff
from nodeagent.model import DRIVER, NODE, Action, Level, kind_of
from nodeagent.policy.rules import Meaning

# per kind of entity; a node has no more than about 250 pods, with three series for each volume
MAX_SERIES = 2048
MAX_EVENTS = 2048
MAX_OWN = 16384  # the same for the node's own hardware: 64 GPUs with 256 codes each
MAX_VARIANTS = 16
GONE_S = 900.0  # without a sample for this long, the entity is gone, because all periods are shorter
Key = TypeVar("Key", bound=tuple[Any, ...])
EvidenceRank = tuple[int, Level]  # the cost of dropping a piece of evidence
FREE: EvidenceRank = (0, Level.HEALTHY)  # it has ended, and no longer counts
COUNTS = 1  # it has ended, and counts towards a recurrence that raises the level
STANDS = 2  # a finding is based on it
Ranked = tuple[EvidenceRank, float, Key]  # with the time when it was last seen
# How much is dropped at once, because a search takes about 30 ms: the limit divided by this.
FREED_SHARE = 16  # for evidence of rank FREE
LOST_SHARE = 256  # for other evidence
SEARCH_EVERY_S = 1.0  # the time between searches for evidence to drop, if the last search found none
OWN = ("gpu", NODE, DRIVER, "nvswitch", "sensor")


def series_limit(kind: str) -> int:
    return MAX_OWN if kind in OWN else MAX_SERIES


def event_limit(kind: str) -> int:
    return MAX_OWN if kind in OWN else MAX_EVENTS


def full_pool(stored: Collection[Key], kind: str, limit: int) -> list[Key]:
    """Return all evidence about a kind of entity if its limit is reached; return nothing if there is room."""
    pool = [each for each in stored if kind_of(each[0]) == kind]
    return pool if len(pool) >= limit else []


def to_give_up(ranked: list[Ranked[Key]], limit: int) -> list[Ranked[Key]]:
    """Return the evidence to drop: of the evidence with the lowest rank, the part last seen longest ago.

    Several pieces are dropped at once, so that a flood does not cause a search for each observation. Evidence
    that still matters is dropped in smaller portions.
    """
    if not ranked:
        return []
    lowest = min(rank for rank, _, _ in ranked)
    most = limit // (FREED_SHARE if lowest == FREE else LOST_SHARE)
    return sorted(each for each in ranked if each[0] == lowest)[: max(1, most)]


@dataclass(frozen=True, slots=True)
class VariantKind:
    """The kind of a variant of an event.

    Variants of the same kind lead to the same finding, except for its age.
    """

    gravity: tuple[Level, Action, int]
    meanings: tuple[Meaning, ...]  # more than one while a driver's branch is unknown

    @property
    def within_s(self) -> float:
        """How long a burst counts towards the recurrence of its own variant; 0 if it never does."""
        each_s = [each.recurs.within_s for each in self.meanings if each.recurs and each.recurs.same_variant]
        return max(each_s, default=0.0)


def drop_variant(
    variants: dict[str, EventBursts],
    kind_of_variant: Callable[[str], VariantKind],
    recurring: Callable[[str], Sequence[Burst]],
    now_s: float,
    off: TimeOff = NEVER_OFF,
) -> bool:
    """Drop the mildest variant that shares its kind with others; among equals, the one seen longest ago.

    If possible, a variant that has recurred is kept while its bursts count. Another variant of the same kind
    inherits the dropped bursts, so the finding keeps its level, its action and its age. If each variant is
    the only one of its kind, all are kept, because there are no more kinds than the policy has meanings.

    Args:
        recurring: Returns the bursts at which a variant had recurred, or that followed while that was in
        force.
        off: When the node was off.

    Returns:
        True if bursts are lost that would have counted towards the recurrence of that variant.
    """
    kinds = {name: kind_of_variant(name) for name in variants if name}
    shared = Counter(kinds.values())
    candidates = [name for name, kind in kinds.items() if shared[kind] > 1]
    if not candidates:
        return False

    def counts(name: str) -> bool:
        since_s = off.window_start_s(now_s - kinds[name].within_s, now_s)
        return kinds[name].within_s > 0.0 and variants[name].spans[-1][1] >= since_s

    def rank(name: str) -> tuple[tuple[Level, Action, int], bool, float, str]:
        stays = counts(name) and bool(recurring(name))
        return kinds[name].gravity, stays, variants[name].last_s, name

    victim = min(candidates, key=rank)
    is_lost, kind, recurred = counts(victim), kinds[victim], recurring(victim)
    dropped = variants.pop(victim)
    heirs = [name for name in candidates if name != victim and kinds[name] == kind]
    heir = variants[max(heirs, key=lambda name: (variants[name].last_s, name))]
    heir.inherit(dropped, recurred)
    return is_lost
