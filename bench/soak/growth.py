"""Decide from a series of readings whether the memory or descriptors of a process or folder grow. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.harness.watch import ProcessReading
from bench.text import slope

WARM_UP = 0.2  # the first share of a series, while caches fill and allocators reach their size
# The same in a run with faults, where the first fault of each kind maps slots and opens connections that
# stay.
WARM_UP_FAULTED = 0.5
LEAST = 8  # a series with fewer readings is not judged
# Resident memory varies by up to this share, or this many bytes, without real growth.
ROOM = 0.05
ROOM_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth from the first to the last quarter after the warm-up, of the series that grew most."""

    what: str
    readings: int
    steps: int
    first_bytes: float
    last_bytes: float
    first_descriptors: float
    last_descriptors: float
    bytes_per_100k_steps: float

    def grows(self, kept: float = 0.0) -> bool:
        """Return True if the memory or the descriptors grow; up to `kept` more descriptors are ignored."""
        room = max(ROOM_BYTES, ROOM * self.first_bytes)
        more_bytes = self.last_bytes - self.first_bytes > room and self.bytes_per_100k_steps > 0
        return more_bytes or self.last_descriptors > self.first_descriptors + kept


def growths(readings: Iterable[ProcessReading], warm_up: float = WARM_UP) -> list[Growth]:
    """Return one result per kind with enough readings after the first `warm_up` (a share) of the series."""
    series: dict[tuple[str, str], list[ProcessReading]] = {}
    for reading in readings:
        series.setdefault((reading.what, reading.key), []).append(reading)
    found: dict[str, Growth] = {}
    for (what, _), each in series.items():
        one = _growth(what, each, warm_up)
        if one is not None and (what not in found or _more(one) > _more(found[what])):
            found[what] = one
    return [found[what] for what in sorted(found)]


def _more(growth: Growth) -> float:
    return growth.last_bytes - growth.first_bytes


def _growth(what: str, series: Sequence[ProcessReading], warm_up: float) -> Growth | None:
    warm = series[int(len(series) * warm_up) :]
    if len(warm) < LEAST:
        return None
    quarter = len(warm) // 4
    first, last = warm[:quarter], warm[-quarter:]
    return Growth(
        what,
        len(series),
        warm[-1].step - warm[0].step,
        statistics.median(each.rss_bytes for each in first),
        statistics.median(each.rss_bytes for each in last),
        statistics.median(each.descriptors for each in first),
        statistics.median(each.descriptors for each in last),
        100_000 * slope([(each.step, each.rss_bytes) for each in warm]),
    )
