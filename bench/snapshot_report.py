"""What the snapshot bench has found: tables and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import Summary, ratio, summary
from bench.table import number, percent, seconds, size, table
from bench.verdicts import Verdict

SNAPSHOT, CHECKPOINT = "holdfast snapshot", "holdfast checkpoint"
BY_TENSOR = "memmove, tensor by tensor, to shared"
ANONYMOUS, SHARED = "one piece, to anonymous", "one piece, to shared"
PLAIN_WRITE = "plain write and fsync"
TARGET = 0.8


def copies_table(nbytes: int, took: Mapping[str, Sequence[float]]) -> str:
    """Return a table of copies of `nbytes`; the first of them is ours."""
    found = {name: summary(each) for name, each in took.items()}
    ours = next(iter(found.values()))
    rows = [_row(name, each, ours, nbytes) for name, each in found.items()]
    return table((size(nbytes), "median", "best", "GB/s", "GB/s best", "ours to it"), rows)


def _row(name: str, each: Summary, ours: Summary, nbytes: int) -> tuple[str, ...]:
    share = "" if each is ours else percent(ratio(each.median, ours.median), 0)
    speeds = (number(ratio(nbytes, at) / 1e9) for at in (each.median, each.best))
    return (name, seconds(each.median), seconds(each.best), *speeds, share)


def shares(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of each plain copy's speed that ours reaches, by medians."""
    median = {name: each["median"] for name, each in row["summary"].items()}
    found: dict[str, float] = {}
    for name, took_s in median.items():
        if name not in (SNAPSHOT, CHECKPOINT):
            found[name] = ratio(took_s, median[CHECKPOINT if name == PLAIN_WRITE else SNAPSHOT])
    return found


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judge each size: 80% of memcpy of the same tensors, of one large piece, of a plain write."""
    found: list[Verdict] = []
    for row in rows:
        reached = shares(row)
        title = size(row["bytes"])
        in_one = min(share for name, share in reached.items() if name.endswith(SHARED))
        found += [
            _judge(f"{title}: snapshot >= 80% of memcpy of the same tensors", reached[BY_TENSOR]),
            _judge(f"{title}: snapshot >= 80% of memcpy of one piece", in_one),
            _judge(f"{title}: checkpoint >= 80% of a plain write", reached[PLAIN_WRITE]),
        ]
    return found


def _judge(target: str, share: float) -> Verdict:
    return Verdict(target, percent(share, 0), share >= TARGET)
