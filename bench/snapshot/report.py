"""The results of the snapshot bench: tables and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.text import Verdict, number, percent, ratio, seconds, summary, table

SNAPSHOT, COPY = "holdfast snapshot", "the copy in it"
EMPTY = "a snapshot of as many tiny tensors"
CHECKPOINT = "holdfast checkpoint"
BY_TENSOR = "memmove, tensor by tensor, to shared"
ANONYMOUS, SHARED = "one piece, to anonymous", "one piece, to shared"
PLAIN_WRITE = "plain write and fsync"
TARGET = 0.8  # of a plain copy's speed


def copies_table(title: str, nbytes: int, took: Mapping[str, Sequence[float]]) -> str:
    """Return a table of holdfast's copies of `nbytes` and plain ones, with their relative speeds."""
    return _table(title, nbytes, took, {SNAPSHOT: "snapshot to it", COPY: "copy to it"})


def stores_table(title: str, nbytes: int, took: Mapping[str, Sequence[float]]) -> str:
    """Return a table of holdfast's checkpoint of `nbytes` and the plain write, with their relative speeds."""
    return _table(title, nbytes, took, {CHECKPOINT: "checkpoint to it"})


def _table(title: str, nbytes: int, took: Mapping[str, Sequence[float]], ours: Mapping[str, str]) -> str:
    found = {name: summary(each) for name, each in took.items()}
    rows = []
    for name, each in found.items():
        reached = (percent(ratio(each.median, found[mine].median), 0) for mine in ours)
        shares = [""] * len(ours) if name in ours else reached
        speeds = (number(ratio(nbytes, at) / 1e9) for at in (each.median, each.best))
        compared = ("",) * (2 + len(ours)) if name == EMPTY else (*speeds, *shares)
        rows.append((name, seconds(each.median), seconds(each.best), *compared))
    return table((title, "median", "best", "GB/s", "GB/s best", *ours.values()), rows)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judge the medians of each state: snapshot and copy against memcpy, checkpoint against plain write."""
    found: list[Verdict] = []
    for row in rows:
        median = {name: each["median"] for name, each in row["summary"].items()}
        in_one = min(took_s for name, took_s in median.items() if name.endswith(SHARED))
        for target, plain_s, ours in (
            (f"snapshot >= {TARGET:.0%} of memcpy of the same tensors", median[BY_TENSOR], SNAPSHOT),
            (f"snapshot >= {TARGET:.0%} of memcpy of one piece", in_one, SNAPSHOT),
            (f"{COPY} >= {TARGET:.0%} of memcpy of the same tensors", median[BY_TENSOR], COPY),
            (f"{COPY} >= {TARGET:.0%} of memcpy of one piece", in_one, COPY),
            (f"checkpoint >= {TARGET:.0%} of a plain write", median[PLAIN_WRITE], CHECKPOINT),
        ):
            share = ratio(plain_s, median[ours])
            found.append(Verdict(f"{row['title']}: {target}", percent(share, 0), share >= TARGET))
    return found
