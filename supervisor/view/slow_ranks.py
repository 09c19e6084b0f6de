"""Find slow ranks, how slow they are, and since when. Slow ranks are reported, not restarted. Pure.

Each sidecar measures its ranks' own times over a window (`sidecar.watch.compute_time`). The time of each rank
is compared with the median of the other ranks. A rank is slow if even the fastest part of its window
exceeds `FACTOR` times that median, and the rank is slower than the median by enough to matter. It stays slow
until its average falls below `END_FACTOR` times the median. While the times of a rank or of its peers are
unknown, its status does not change.

False alarms are rare. If the step times of two ranks are distributed evenly between 1x and 5x, about one
window in 10^11 raises a false alarm. If one step in five takes 5x and all others take 1x, about one window in
30,000 raises one. The more the step times of a rank vary, the slower the rank must be to be found in its
first window. If all of its steps take equally long, it must take 1.5 times as long as its peers. If its step
times are distributed evenly between 1x and 5x, it must take 2.5 times as long.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from holdfast.protocol.member_messages import RankProgress
from supervisor.view.model import View

FACTOR = 1.5
END_FACTOR = 1.25
MIN_SHARE = 0.1  # the smallest difference that matters, as a share of the step time
MIN_DIFFERENCE_S = 0.001  # smaller differences come from the scheduling of processes on shared cores


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A slow rank. Times are per step, in seconds."""

    generation: int
    rank: int
    own_s: float
    data_s: float  # the part of `own_s` before the forward pass; the rest is the forward pass
    peers_s: float  # the median of the other ranks' own times
    since: int  # the step at which the rank became slow

    @property
    def factor(self) -> float:
        return self.own_s / self.peers_s


def find_slow_ranks(before: tuple[SlowRank, ...], view: View) -> tuple[SlowRank, ...]:
    """Return the slow ranks in ascending order. `before` is the result of the previous call."""
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
        found[each.rank] = SlowRank(generation, each.rank, each.own_s, each.own_data_s, peers_s, since)
    return tuple(sorted(found.values(), key=lambda slow: slow.rank))


def _with_whole_window(view: View) -> list[RankProgress]:
    """Return the progress of the current generation's ranks whose windows are full."""
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
    """Return the median of two or more sorted numbers, without the one at index `at`."""
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2
