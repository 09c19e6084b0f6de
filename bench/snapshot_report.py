"""What the snapshot bench has found: tables and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import ratio, summary
from bench.table import number, percent, seconds, table
from bench.verdicts import Verdict

SNAPSHOT, COPY = "holdfast snapshot", "the copy in it"
CHECKPOINT = "holdfast checkpoint"
BY_TENSOR = "memmove, tensor by tensor, to shared"
ANONYMOUS, SHARED = "one piece, to anonymous", "one piece, to shared"
PLAIN_WRITE = "plain write and fsync"
TARGET = 0.8


def copies_table(title: str, nbytes: int, took: Mapping[str, Sequence[float]]) -> str:
    """Return a table of copies of `nbytes`: ours, then others with the shares of their speed."""
    return _table(title, nbytes, took, {SNAPSHOT: "snapshot to it", COPY: "copy to it"})


def stores_table(title: str, nbytes: int, took: Mapping[str, Sequence[float]]) -> str:
    """Return the same of writes to storage."""
    return _table(title, nbytes, took, {CHECKPOINT: "ours to it"})


def _table(title: str, nbytes: int, took: Mapping[str, Sequence[float]], ours: Mapping[str, str]) -> str:
    found = {name: summary(each) for name, each in took.items()}
    rows = []
    for name, each in found.items():
        reached = (percent(ratio(each.median, found[mine].median), 0) for mine in ours)
        shares = [""] * len(ours) if name in ours else reached
        speeds = (number(ratio(nbytes, at) / 1e9) for at in (each.median, each.best))
        rows.append((name, seconds(each.median), seconds(each.best), *speeds, *shares))
    return table((title, "median", "best", "GB/s", "GB/s best", *ours.values()), rows)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judge each state: the copy by memcpy (the tensors, one piece), the checkpoint by a write.

    Copies by their medians; writes by the best of each, for their medians tell who got memory that was free
    for long: on a virtual machine its first use costs up to 2 s for 1 GB.
    """
    found: list[Verdict] = []
    for row in rows:
        median, best = (
            {name: each[kind] for name, each in row["summary"].items()} for kind in ("median", "best")
        )
        in_one = min(took_s for name, took_s in median.items() if name.endswith(SHARED))
        for target, share in (
            ("snapshot copy >= 80% of memcpy of the same tensors", ratio(median[BY_TENSOR], median[COPY])),
            ("snapshot copy >= 80% of memcpy of one piece", ratio(in_one, median[COPY])),
            ("checkpoint >= 80% of a plain write, at best", ratio(best[PLAIN_WRITE], best[CHECKPOINT])),
        ):
            found.append(Verdict(f"{row['title']}: {target}", percent(share, 0), share >= TARGET))
    return found
