"""Simulate faults, repairs, standbys and checkpoints event by event. Pure: the random source is an argument.

The simulation follows the job through time, and uses none of the formulas except for the checkpoint interval.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from supervisor.planning.formulas import checkpoints
from supervisor.planning.model import SizingInputs

EVENTS = 20_000
_BATCHES = 20

Chance = Callable[[], float]  # returns a number in [0, 1)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulation measured. The errors are standard errors, estimated from batches of events.

    Attributes:
        ready: The share of the lost nodes that found a standby; 1 if none was lost.
        waiting: The share of the time that the job waited for a node.
    """

    ettr: float
    ettr_error: float
    ready: float
    waiting: float
    waiting_error: float


@dataclass(slots=True)
class _Totals:
    elapsed_s: float = 0.0
    useful_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(slots=True)
class _Job:
    """A job that trains. `back_at_s` is a heap of the times at which lost nodes come back."""

    inputs: SizingInputs
    chance: Chance
    standbys: int
    fixed_repairs: bool
    now_s: float = 0.0
    since_restore_s: float = 0.0  # training since the state was last read from a checkpoint
    back_at_s: list[float] = field(default_factory=list)
    losses: int = 0
    found: int = 0
    totals: _Totals = field(default_factory=_Totals)

    def train(self, spent_s: float, lost_s: float) -> None:
        self.now_s += spent_s
        self.since_restore_s += spent_s
        self.totals.elapsed_s += spent_s
        self.totals.useful_s += spent_s - lost_s

    def stop(self, spent_s: float) -> None:
        self.now_s += spent_s
        self.totals.elapsed_s += spent_s

    def lose_node(self, at_s: float) -> None:
        """Replace the lost node with a standby, or wait for the first node that comes back."""
        self.losses += 1
        mean_s = self.inputs.refill_s
        heapq.heappush(self.back_at_s, at_s + (mean_s if self.fixed_repairs else _draw(mean_s, self.chance)))
        while self.back_at_s and self.back_at_s[0] <= self.now_s:
            heapq.heappop(self.back_at_s)
            self.standbys += 1
        if self.standbys:
            self.standbys -= 1
            self.found += 1
            return
        wait_s = heapq.heappop(self.back_at_s) - self.now_s
        self.stop(wait_s)
        self.totals.waiting_s += wait_s


def _draw(mean_s: float, chance: Chance) -> float:
    """Draw from the exponential distribution."""
    return -mean_s * math.log1p(-chance())


def simulate(
    inputs: SizingInputs,
    standbys: int,
    chance: Chance,
    *,
    events: int = EVENTS,
    fixed_repairs: bool = False,
) -> Simulated:
    """Return what `events` faults and outages cost a job that has `standbys`."""
    job = _Job(inputs, chance, standbys, fixed_repairs)
    batches = []
    for _ in range(_BATCHES):
        job.totals = _Totals()
        for _ in range(events // _BATCHES):
            _one_event(job)
        batches.append(job.totals)
    elapsed_s = sum(each.elapsed_s for each in batches)
    ettr = sum(each.useful_s for each in batches) / elapsed_s
    waiting = sum(each.waiting_s for each in batches) / elapsed_s
    mean_s = elapsed_s / _BATCHES
    return Simulated(
        ettr=max(0.0, ettr),
        ettr_error=_error([(each.useful_s - ettr * each.elapsed_s) / mean_s for each in batches]),
        ready=job.found / job.losses if job.losses else 1.0,
        waiting=waiting,
        waiting_error=_error([(each.waiting_s - waiting * each.elapsed_s) / mean_s for each in batches]),
    )


def _error(residuals: list[float]) -> float:
    """Return the standard error of a ratio of sums, from the residuals of the batches."""
    count = len(residuals)
    return math.sqrt(sum(each * each for each in residuals) / (count - 1) / count)


def _one_event(job: _Job) -> None:
    """Train until the next fault or the next loss of all copies, and recover from it."""
    inputs, plan = job.inputs, checkpoints(job.inputs)
    outages = 1.0 / plan.all_copies_s
    rate = inputs.fault_rate + outages
    spent_s = _draw(1.0 / rate, job.chance)
    begun = math.floor((job.since_restore_s + spent_s) / plan.interval_s) - math.floor(
        job.since_restore_s / plan.interval_s
    )
    job.train(spent_s, begun * plan.cost_s)
    if job.chance() * rate < outages:
        whole = max(0, math.floor((job.since_restore_s - plan.write_s) / plan.interval_s))
        job.totals.useful_s -= job.since_restore_s - whole * plan.interval_s
        job.since_restore_s = 0.0
        job.stop(plan.write_s)
        return
    at_s = job.now_s
    job.totals.useful_s -= inputs.step_s
    job.stop(inputs.detection_s + inputs.recovery_s)
    if job.chance() < inputs.node_loss:
        job.lose_node(at_s)
