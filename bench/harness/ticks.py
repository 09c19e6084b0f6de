"""Record all ranks' steps inside the ranks, and read them outside, the same way for every launcher.

Each rank appends one record right after each `optimizer.step()`. An append of 32 bytes takes a microsecond,
and is either complete or absent no matter when the writer is killed. Uses only the standard library, because
the workloads import this module.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "HOLDFAST_BENCH_TICKS"  # gives the ranks the path of the file
_RECORD = struct.Struct("<qqiiii")


@dataclass(frozen=True, slots=True)
class Tick:
    """One optimizer step of one rank. `generation` is the number of restarts of the group so far."""

    at_ns: int  # CLOCK_MONOTONIC
    step: int
    pid: int
    generation: int
    rank: int


class Ticker:
    """Records the steps of one rank; does nothing if the script was not started by a bench."""

    def __init__(self) -> None:
        path = os.environ.get(VARIABLE)
        self._file = -1
        if path:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._who = (
            os.getpid(),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            int(os.environ.get("RANK", "0")),
        )

    def tick(self, step: int) -> None:
        """Record that the optimizer has finished step `step`."""
        if self._file >= 0:
            os.write(self._file, _RECORD.pack(time.monotonic_ns(), step, *self._who, 0))


@dataclass(slots=True)
class TickFile:
    """Reads the records as the ranks append them."""

    path: Path
    ticks: list[Tick] = field(default_factory=list)
    _at: int = 0

    def follow(self) -> list[Tick]:
        """Read the records added since the last call, and return all records so far."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                found = file.read()
        except FileNotFoundError:
            return self.ticks
        whole = len(found) // _RECORD.size * _RECORD.size
        self._at += whole
        self.ticks += [Tick(*fields[:5]) for fields in _RECORD.iter_unpack(found[:whole])]
        return self.ticks


@dataclass(frozen=True, slots=True)
class Regained:
    """The first generation after a kill in which every rank has completed a step."""

    generation: int
    first_ns: int  # when the first rank ended its first step
    all_ns: int  # when the last rank ended its first step
    step: int  # the lowest step of this generation
    pids: tuple[int, ...]


def newest(ticks: Iterable[Tick]) -> dict[int, Tick]:
    """Return the last record of each rank of the newest generation."""
    found: dict[int, Tick] = {}
    generation = -1
    for tick in ticks:
        if tick.generation > generation:
            generation, found = tick.generation, {}
        if tick.generation == generation:
            found[tick.rank] = tick
    return found


def regained(ticks: Iterable[Tick], after: int, world_size: int) -> Regained | None:
    """Return the first generation after `after` whose ranks have all completed a step, or None."""
    first: dict[int, dict[int, Tick]] = {}
    for tick in ticks:
        if tick.generation > after:
            first.setdefault(tick.generation, {}).setdefault(tick.rank, tick)
    for generation in sorted(first):
        found = first[generation].values()
        if len(found) == world_size:
            times = [tick.at_ns for tick in found]
            pids = tuple(sorted(tick.pid for tick in found))
            return Regained(generation, min(times), max(times), min(tick.step for tick in found), pids)
    return None


def redone(ticks: Iterable[Tick], before: int, restarted: Regained) -> int:
    """Return how many of the steps that generation `before` had finished on any rank the group repeated."""
    last = max((tick.step for tick in ticks if tick.generation == before), default=-1)
    return max(0, last + 1 - restarted.step)


def step_times_s(ticks: Sequence[Tick], rank: int, skip: int) -> list[float]:
    """Return the times between the steps of `rank`, omitting the first `skip` of each generation."""
    mine = [tick for tick in ticks if tick.rank == rank]
    times: list[float] = []
    seen, last = 0, None
    for tick in mine:
        if last is None or tick.generation != last.generation:
            seen = 0
        else:
            seen += 1
            if seen > skip:
                times.append((tick.at_ns - last.at_ns) / 1e9)
        last = tick
    return times
