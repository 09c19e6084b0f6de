"""Find slow ranks: by how much and since when. They are only reported: a slow rank is not a fault. Pure.

Each rank's own time is compared with the median of the others', over the window that its sidecar keeps
(`sidecar.watch.compute_time`). A rank is slow if even the shortest part of its window takes `FACTOR` times
what the others take on average, and the difference is large enough to matter. It stays slow until its average
falls to `END_FACTOR` times. In between nothing changes, nor while the times of a rank or its peers are
unknown.

Steps that vary evenly and at random from 1x to 5x cause a false alarm in about one of 10^11 windows of two
ranks; if one step in five takes 5x and all others 1x, in one of 30,000. The more a rank's steps vary, the
slower it has to be to be found in its first window: in the first case 2.5 times, with equal steps 1.5 times.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from holdfast.protocol.member_messages import RankProgress
from supervisor.view.model import View

FACTOR = 1.5
END_FACTOR = 1.25
MIN_SHARE = 0.1  # of the step time
MIN_DIFFERENCE_S = 0.001  # a smaller one comes from how the machine shares its cores


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank. Times are per step, in seconds."""

    generation: int
    rank: int
    own_s: float
    data_s: float  # the part of `own_s` before the forward pass; the rest is that pass
    peers_s: float  # median of the other ranks' own times
    since: int  # the step at which it began

    @property
    def factor(self) -> float:
        return self.own_s / self.peers_s


def find_stragglers(before: tuple[Straggler, ...], view: View) -> tuple[Straggler, ...]:
    """Return the slow ranks in the order of ranks; `before` is the result of the last call."""
    generation = view.memory.generation
    known = _with_whole_window(view)
    own_times_s = sorted(each.own_s for each in known)
    found = {each.rank: each for each in before if each.generation == generation}
    for each in known if len(known) > 1 else ():
        peers_s = _median_without(own_times_s, bisect_left(own_times_s, each.own_s))
        held = found.pop(each.rank, None)
        if _is_over(each, peers_s) if held else not _is_slow(each, peers_s):
            continue
        since = held.since if held else max(0, each.step - each.own_steps)
        found[each.rank] = Straggler(generation, each.rank, each.own_s, each.own_data_s, peers_s, since)
    return tuple(sorted(found.values(), key=lambda slow: slow.rank))


def _with_whole_window(view: View) -> list[RankProgress]:
    """Return the progress of the ranks of the present generation that have a whole window."""
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


def _is_slow(rank: RankProgress, peers_s: float) -> bool:
    return rank.own_least_s > FACTOR * peers_s and rank.own_s - peers_s >= _min_difference_s(rank)


def _is_over(rank: RankProgress, peers_s: float) -> bool:
    return rank.own_s < END_FACTOR * peers_s or rank.own_s - peers_s < _min_difference_s(rank) / 2


def _min_difference_s(rank: RankProgress) -> float:
    return max(MIN_DIFFERENCE_S, MIN_SHARE * rank.step_s)


def _median_without(ordered: list[float], at: int) -> float:
    """Return the median of two or more sorted numbers without the one at index `at`."""
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2
