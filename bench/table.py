"""Text tables and units for people. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with the first column to the left and all others to the right."""
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
    """Return a time with three digits that count: `0.104 s`, `12 us`."""
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
    """Return bytes in decimal units, as disks and buses are counted."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * factor:  # what three digits show as a thousand of the unit below
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def size_of(text: str) -> int:
    """Return the bytes that a size such as 1.5G or 300M stands for. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text.strip())
    if match is None:
        raise ValueError(f"a size of {text!r}: expected a number with k, M or G, such as 1.5G")
    return int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])
