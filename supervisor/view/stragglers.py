"""Which ranks are slow, by how much, since when? Told, and nothing else: a slow rank is no fault. Pure.

Compared is each rank's own time with the median of the others', over the window that its sidecar keeps
(`sidecar.watch.compute_time`). A rank is slow when even the shortest part of its window is `FACTOR` times
what the others take on average, and the difference is worth something. It stays so until its average comes
down to `END_FACTOR` times. In between nothing changes, nor while a rank or its peers are not known.

Steps that vary evenly and by chance from 1x to 5x give a false alarm in about one of 10^11 windows of two
ranks; where one step in five takes 5x and all others 1x, in one of 30,000. The more a rank's steps vary, the
slower it has to be, to be named in its first window: with the former 2.5 times, with equal ones 1.5 times.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from holdfast.protocol.member_messages import RankProgress
from supervisor.view.model import View

FACTOR = 1.5
END_FACTOR = 1.25
WORTH_SHARE = 0.1  # of the step time
WORTH_S = 0.001  # below, it is how the machine shares out its cores


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow. Times are of a step, in seconds."""

    generation: int
    rank: int
    own_s: float
    data_s: float  # the part of `own_s` before the forward pass; the rest is that
    peers_s: float  # median of the other ranks' own
    since: int  # step

    @property
    def factor(self) -> float:
        return self.own_s / self.peers_s


def find_stragglers(before: tuple[Straggler, ...], view: View) -> tuple[Straggler, ...]:
    """Return the ranks that are slow now, by rank; `before` is what the last call returned."""
    generation = view.memory.generation
    known = _known(view)
    owns = sorted(each.own_s for each in known)
    found = {each.rank: each for each in before if each.generation == generation}
    for each in known if len(known) > 1 else ():
        peers_s = _median_without(owns, bisect_left(owns, each.own_s))
        held = found.pop(each.rank, None)
        if _is_over(each, peers_s) if held else not _became(each, peers_s):
            continue
        since = held.since if held else max(0, each.step - each.own_steps)
        found[each.rank] = Straggler(generation, each.rank, each.own_s, each.own_data_s, peers_s, since)
    return tuple(sorted(found.values(), key=lambda slow: slow.rank))


def _known(view: View) -> list[RankProgress]:
    """Return what the ranks of the present generation have said of whole windows."""
    active = set(view.memory.placement)
    reports = [each.report for each in view.members if each.connected and each.name in active]
    return [
        each
        for report in reports
        if report is not None
        and report.launcher is not None
        and report.launcher.generation == view.memory.generation
        for each in report.progress
        if each.own_s > 0
    ]


def _became(rank: RankProgress, peers_s: float) -> bool:
    return rank.own_least_s > FACTOR * peers_s and rank.own_s - peers_s >= _worth_s(rank)


def _is_over(rank: RankProgress, peers_s: float) -> bool:
    return rank.own_s < END_FACTOR * peers_s or rank.own_s - peers_s < _worth_s(rank) / 2


def _worth_s(rank: RankProgress) -> float:
    return max(WORTH_S, WORTH_SHARE * rank.step_s)


def _median_without(ordered: list[float], at: int) -> float:
    """Return the median of what is left of two numbers or more without that in place `at`."""
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2
