"""Read the value of one option. Pure.

A reader raises `ValueError` that says what is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from holdfast import wire

Reader = Callable[[str], object]

_DURATION = re.compile(r"(?P<count>\d+(?:\.\d+)?|\.\d+)\s?(?P<unit>ms|s|sec|m|min|h|d)?", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def count(low: int, high: int, words: dict[str, int] | None = None) -> Reader:
    """Accept a whole number, or one of `words`."""
    named = words or {}

    def read(text: str) -> int:
        if text in named:
            return named[text]
        if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            also = "".join(f", or {word!r}" for word in named)
            raise ValueError(f"a whole number from {low} to {high}{also}")
        return int(text)

    return read


def number(low: float, high: float, zero: str = "") -> Reader:
    """Accept a number; with `zero`, also 0, which means that."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if zero and value == 0:
            return 0.0
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g}" + (f", or 0: {zero}" * bool(zero)))
        return value

    return read


def share(text: str) -> float:
    """Accept a share of the whole: 0.01 or 1%."""
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError("a share above 0 and up to 1, such as 0.01 or 1%")
    return value


def duration(low_s: float, high_s: float, zero: str = "") -> Reader:
    """Accept 30s, 5m, 250ms or plain seconds; with `zero`, also 0, which means that."""

    def read(text: str) -> float:
        match = _DURATION.fullmatch(text)
        seconds = float(match["count"]) * _SECONDS[match["unit"] or "s"] if match else math.nan
        if zero and seconds == 0:
            return 0.0
        if not low_s <= seconds <= high_s:
            also = f", or 0: {zero}" if zero else ""
            raise ValueError(f"a duration such as 30s or 5m, from {_span(low_s)} to {_span(high_s)}{also}")
        return seconds

    return read


def _span(spent_s: float) -> str:
    """Return a bound the way that one would write it: 1s, 30m, 7d."""
    for unit in ("d", "h", "m", "s"):
        if spent_s >= _SECONDS[unit] and spent_s % _SECONDS[unit] == 0:
            return f"{spent_s / _SECONDS[unit]:g}{unit}"
    return f"{spent_s * 1000:g}ms" if spent_s else "0s"


def choice(*accepted: str) -> Reader:
    def read(text: str) -> str:
        if text not in accepted:
            raise ValueError(f"one of {', '.join(accepted)}")
        return text

    return read


def directory(text: str) -> Path:
    if not text or text.startswith("--") or "\0" in text:
        raise ValueError("the path of a directory")
    return Path(text).expanduser()


def ranks(text: str) -> int | str:
    """Accept a number of ranks, or torchrun's words for as many as there are devices."""
    if text in ("auto", "cpu", "gpu"):
        return text
    return whole(text, 1, wire.MAX_RANKS, ", or auto, cpu or gpu")


def nodes(text: str) -> int:
    """Accept torchrun's N or N:N. A range that leaves a choice is not supported."""
    low, colon, high = text.partition(":")
    members = whole(low, 1, 4096, " (or N:N)")
    if colon and whole(high, 1, 4096, " (or N:N)") != members:
        raise ValueError(f"one number: growing and shrinking is not supported yet, so {low} or {high}")
    return members


def whole(text: str, low: int, high: int, also: str) -> int:
    if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
        raise ValueError(f"a whole number from {low} to {high}{also}")
    return int(text)
