"""Draw the faults of a chaos run from a seed. Pure.

The schedule depends on the seed, the names of the faults and the jobs, and on nothing that happens during the
run. Each kind of fault occurs equally often, in random order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.chaos.fault_table import CHAOS_FAULTS, SECOND, ChaosFault
from bench.chaos.job_table import ChaosJob
from bench.soak.faults import bag

SECOND_S = (0.0, 1.0)  # how soon a second fault follows the first; most recoveries take longer
GAP_S = 3.0  # the mean time from the moment when all jobs are calm to the next fault


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault to inject `gap_s` after the jobs are calm, and perhaps a second one `second_s` later."""

    number: int
    kind: str
    job: str
    rank: int
    gap_s: float
    lasts_s: float
    second: str = ""
    second_job: str = ""
    second_rank: int = 0
    second_s: float = 0.0

    @property
    def fault(self) -> ChaosFault:
        return CHAOS_FAULTS[self.kind]

    @property
    def line(self) -> str:
        """One line that describes the planned fault."""
        where = f" (rank {self.rank} of {self.job})" if self.job else ""
        lasts = f" for {self.lasts_s:.0f} s" if self.lasts_s else ""
        then = f", and {self.second_s:.1f} s later {self.second}" if self.second else ""
        whose = f" (rank {self.second_rank} of {self.second_job})" if self.second_job else ""
        return f"{self.number:3}  {self.kind}{where}{lasts}{then}{whose}"


def schedule(
    seed: int, kinds: Sequence[str], jobs: Sequence[ChaosJob], double: float
) -> Iterator[PlannedFault]:
    """Yield faults without end; `double` is the probability of a second fault, where one is possible.

    A fault for which there is no suitable job is left out.
    """
    chance = random.Random(seed)
    able = tuple(kind for kind in kinds if _suitable(CHAOS_FAULTS[kind], jobs))
    seconds = tuple(kind for kind in SECOND if kind in able)
    for number, kind in enumerate(bag(chance, able), 1):
        yield _planned(chance, number, kind, jobs, seconds, double)


def _planned(
    chance: random.Random,
    number: int,
    kind: str,
    jobs: Sequence[ChaosJob],
    seconds: Sequence[str],
    double: float,
) -> PlannedFault:
    fault = CHAOS_FAULTS[kind]
    gap_s, lasts_s = chance.expovariate(1 / GAP_S), chance.uniform(*fault.lasts_s)
    job = chance.choice(_suitable(fault, jobs))
    rank = chance.randrange(job.members)
    has_target = fault.strikes_one_job
    planned = PlannedFault(
        number,
        kind,
        job.name if has_target else "",
        rank if has_target else 0,
        round(gap_s, 2),
        round(lasts_s, 1),
    )
    return _with_second(chance, planned, jobs, seconds, double)


def _with_second(
    chance: random.Random,
    first: PlannedFault,
    jobs: Sequence[ChaosJob],
    seconds: Sequence[str],
    double: float,
) -> PlannedFault:
    """Add a second fault. The same job is never struck twice, because one member may hold its only copy."""
    others = [job for job in jobs if job.name != first.job]
    able = [
        kind
        for kind in seconds
        if (first.fault.is_in_place or first.fault.place == "leader")
        and (CHAOS_FAULTS[kind].place != first.fault.place or first.fault.is_in_place)
        and (CHAOS_FAULTS[kind].place == "leader" or others)
    ]
    wanted, second_s = chance.random() < double, chance.uniform(*SECOND_S)
    if not (wanted and able):
        return first
    kind = chance.choice(able)
    job = chance.choice(others) if CHAOS_FAULTS[kind].place == "rank" else None
    return PlannedFault(
        first.number, first.kind, first.job, first.rank, first.gap_s, first.lasts_s,
        kind, job.name if job else "", chance.randrange(job.members) if job else 0, round(second_s, 2),
    )  # fmt: skip


def _suitable(fault: ChaosFault, jobs: Sequence[ChaosJob]) -> list[ChaosJob]:
    return [job for job in jobs if job.kind in fault.owners]
