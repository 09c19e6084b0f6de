"""Format the benches' output: tables, numbers with units, summaries of samples, verdicts on targets. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with the first column left-aligned and all others right-aligned."""
    lines = [headers, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(headers))]
    shown = ["  ".join(_place(line, widths)).rstrip() for line in lines]
    shown.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(shown)


def _place(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if at == 0 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def seconds(value: float | None) -> str:
    """Return a time with three significant digits, such as `0.104 s` or `12 us`; `-` if there is none."""
    if value is None or math.isnan(value):
        return "-"
    if value >= 0.095:
        return f"{value:.3f} s"
    if value >= 0.000_95:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def size(value: float) -> str:
    """Return a number of bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * factor:  # otherwise 999.6 kB would be shown as 1000 kB and not as 1 MB
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def size_of(text: str) -> int:
    """Return a size such as 1.5G or 300M in bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text.strip())
    if match is None:
        raise ValueError(f"invalid size {text!r}: expected a number with k, M or G, such as 1.5G")
    return int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a sample; all are NaN if the sample is empty.

    `p90` (nearest rank) is a value of the sample.
    """

    count: int
    median: float
    p90: float
    worst: float
    best: float
    mean: float


def summary(values: Sequence[float]) -> Summary:
    if not values:
        return Summary(0, *[math.nan] * 5)
    return Summary(
        len(values),
        statistics.median(values),
        percentile(values, 90),
        max(values),
        min(values),
        statistics.fmean(values),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` percent of `values` do not exceed.

    `values` must not be empty.
    """
    ordered = sorted(values)
    rank = math.ceil(share / 100 * len(ordered))
    return ordered[max(0, rank - 1)]


def ratio(above: float, below: float) -> float:
    """Return `above / below`; NaN if `below` is 0."""
    return above / below if below else math.nan


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of the (x, y) points; 0 with fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    across = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return across / sum((x - mean_x) ** 2 for x, _ in points)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, the result, and whether it meets the target; None if too little was measured."""

    target: str
    found: str
    met: bool | None

    @property
    def line(self) -> str:
        word = {True: "ok    ", False: "MISSED", None: "open  "}[self.met]
        return f"{word}  {self.target}: {self.found}"


def at_most(target: str, value: float, limit: float, shown: str) -> Verdict:
    """Judge a number that must not exceed `limit`; NaN means that it was not measured."""
    return Verdict(target, shown, None if value != value else value <= limit)


def below(target: str, value: float, limit: float, shown: str) -> Verdict:
    """Judge a number that must stay below `limit`; NaN means that it was not measured."""
    return Verdict(target, shown, None if value != value else value < limit)


def all_met(verdicts: Iterable[Verdict]) -> bool:
    return all(each.met is not False for each in verdicts)
