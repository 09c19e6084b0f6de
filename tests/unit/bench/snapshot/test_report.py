from __future__ import annotations

from typing import Any

from bench.snapshot.report import (
    BY_TENSOR,
    CHECKPOINT,
    COPY,
    EMPTY,
    PLAIN_WRITE,
    SHARED,
    SNAPSHOT,
    copies_table,
    stores_table,
    verdicts,
)


def row() -> dict[str, Any]:
    median = {
        SNAPSHOT: 2.0,
        COPY: 1.0,
        BY_TENSOR: 0.9,
        f"memmove, {SHARED}": 0.5,
        f"torch copy_, {SHARED}": 0.95,
        CHECKPOINT: 2.0,
        PLAIN_WRITE: 1.8,
    }
    return {
        "title": "100 MB",
        "summary": {name: {"median": took} for name, took in median.items()},
    }


def test_snapshot_and_copy_are_judged_against_the_fastest_plain_copy() -> None:
    judged = verdicts([row()])
    assert [each.found for each in judged] == ["45%", "25%", "90%", "50%", "90%"]
    assert [each.met for each in judged] == [False, False, True, False, True]
    assert all(each.target.startswith("100 MB: ") for each in judged)


def test_the_table_shows_speeds_and_their_ratio_to_plain_copies() -> None:
    took = {SNAPSHOT: [1.0], COPY: [0.8], BY_TENSOR: [0.5]}
    title, _, snapshot, copy, plain = copies_table("2 GB in 3 tensors", 2_000_000_000, took).splitlines()
    assert title.startswith("2 GB in 3 tensors")
    assert snapshot.split()[-2:] == ["2.00", "2.00"]
    assert copy.split()[-2:] == ["2.50", "2.50"]
    assert plain.split()[-4:] == ["4.00", "4.00", "50%", "62%"]


def test_a_snapshot_of_no_bytes_has_a_time_but_no_speed() -> None:
    took = {SNAPSHOT: [1.0], COPY: [0.8], EMPTY: [0.1], BY_TENSOR: [0.5]}
    line = copies_table("2 GB in 3 tensors", 2_000_000_000, took).splitlines()[4]
    assert line.removeprefix(EMPTY).split() == ["0.100", "s", "0.100", "s"]


def test_the_table_of_writes_has_one_ratio() -> None:
    lines = stores_table("1 GB", 1_000_000_000, {CHECKPOINT: [1.0], PLAIN_WRITE: [0.5]}).splitlines()
    assert lines[3].split()[-3:] == ["2.00", "2.00", "50%"]
