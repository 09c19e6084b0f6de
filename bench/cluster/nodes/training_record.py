"""What a job's ranks have printed, when each line arrived, and the figures that follow from this. Pure.

A step counts as soon as a rank prints it as completed. All times are from this machine's clock, so they
include the time that a line takes through the kubelet and the API server, and no two clocks are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TICK = re.compile(r"tick (\d+) rank (\d+) generation (\d+)")
_DIGEST = re.compile(r"digest (\d+) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class PrintedStep:
    """A step that a rank has completed. `at_s` is when its line arrived."""

    at_s: float
    step: int
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class PrintedDigest:
    """The digest of the weights after a step."""

    step: int
    digest: str


def parse(line: str, at_s: float) -> PrintedStep | PrintedDigest | None:
    """Return the step or digest in a line; None for any other line."""
    line = line.strip()
    if found := _TICK.fullmatch(line):
        return PrintedStep(at_s, *(int(each) for each in found.groups()))
    if found := _DIGEST.fullmatch(line):
        return PrintedDigest(int(found[1]), found[2])
    return None


def newest_generation(steps: Iterable[PrintedStep]) -> int:
    """Return the newest generation that has completed a step; 0 if none has."""
    return max((each.generation for each in steps), default=0)


def resumed_s(steps: Iterable[PrintedStep], generation: int, ranks: int) -> float | None:
    """Return when all ranks had completed a step of a generation later than `generation`; None if not yet."""
    first: dict[int, float] = {}
    for each in steps:
        if each.generation > generation:
            first[each.rank] = min(each.at_s, first.get(each.rank, each.at_s))
    return max(first.values()) if len(first) == ranks else None


def steps_lost(steps: Sequence[PrintedStep], generation: int) -> int:
    """Return how many steps of generations up to `generation` were completed again by later generations."""
    reached = max((each.step for each in steps if each.generation <= generation), default=-1)
    resumed = min((each.step for each in steps if each.generation > generation), default=reached + 1)
    return max(0, reached + 1 - resumed)


def longest_pause_s(steps: Iterable[PrintedStep], from_s: float, to_s: float) -> float:
    """Return the longest pause, without any new step, that ends between `from_s` and `to_s`.

    A step is new once any rank has completed it for the first time. The first pause begins with the last new
    step before `from_s`. A pause that has not ended by `to_s` counts as well.
    """
    first: dict[int, float] = {}
    for each in steps:
        first[each.step] = min(each.at_s, first.get(each.step, each.at_s))
    before = [at_s for at_s in first.values() if at_s < from_s]
    within = sorted(at_s for at_s in first.values() if from_s <= at_s <= to_s)
    points = [max(before, default=from_s), *within, to_s]
    return max(later - earlier for earlier, later in pairwise(points))


def differing_digests(found: Iterable[PrintedDigest], expected: Mapping[int, str]) -> list[int]:
    """Return the steps at which a digest differs from the undisturbed run's digest."""
    return sorted({each.step for each in found if expected.get(each.step, each.digest) != each.digest})


def compared(found: Iterable[PrintedDigest], expected: Mapping[int, str]) -> int:
    """Return the number of steps for which both runs have a digest."""
    return len({each.step for each in found} & set(expected))
