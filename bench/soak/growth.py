"""Does anything grow? Series of readings of each process and folder, and what became of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.harness.watch import Reading
from bench.text import slope

WARM_UP = 0.2  # of a series: caches fill, allocators find their size
WARM_UP_FAULTED = (
    0.5  # the first fault of each kind maps slots, starts threads, opens connections that are kept
)
LEAST = 8  # readings; fewer tell nothing
ROOM = 0.05  # resident memory moves without anything growing
ROOM_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Growth:
    """From the first quarter after the warm-up to the last one, of the one that grew most."""

    what: str
    readings: int
    steps: int
    first_bytes: float
    last_bytes: float
    first_descriptors: float
    last_descriptors: float
    bytes_per_100k_steps: float

    def grows(self, kept: float = 0.0) -> bool:
        """Say whether it does; up to `kept` more descriptors are not taken for growth."""
        room = max(ROOM_BYTES, ROOM * self.first_bytes)
        more_bytes = self.last_bytes - self.first_bytes > room and self.bytes_per_100k_steps > 0
        return more_bytes or self.last_descriptors > self.first_descriptors + kept


def growths(readings: Iterable[Reading], warm_up: float = WARM_UP) -> list[Growth]:
    """Return one result for each kind of thing that was looked at often enough after its warm-up, a share."""
    series: dict[tuple[str, str], list[Reading]] = {}
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


def _growth(what: str, series: Sequence[Reading], warm_up: float) -> Growth | None:
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
