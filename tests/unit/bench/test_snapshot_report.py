from __future__ import annotations

from typing import Any

from bench.snapshot_report import (
    BY_TENSOR,
    CHECKPOINT,
    PLAIN_WRITE,
    SHARED,
    SNAPSHOT,
    copies_table,
    shares,
    verdicts,
)


def row() -> dict[str, Any]:
    median = {
        SNAPSHOT: 1.0,
        BY_TENSOR: 0.9,
        f"memmove, {SHARED}": 0.5,
        f"torch copy_, {SHARED}": 0.95,
        CHECKPOINT: 2.0,
        PLAIN_WRITE: 1.8,
    }
    return {"bytes": 100_000_000, "summary": {name: {"median": took} for name, took in median.items()}}


def test_a_share_is_of_the_plain_copys_speed() -> None:
    found = shares(row())
    assert found[BY_TENSOR] == 0.9
    assert found[PLAIN_WRITE] == 0.9
    assert SNAPSHOT not in found


def test_the_fastest_plain_copy_is_the_one_that_counts() -> None:
    judged = verdicts([row()])
    assert [each.met for each in judged] == [True, False, True]
    assert judged[1].found == "50%"


def test_the_table_has_speeds_and_our_share_of_each() -> None:
    lines = copies_table(2_000_000_000, {SNAPSHOT: [1.0], BY_TENSOR: [0.5]}).splitlines()
    assert lines[2].split()[-2:] == ["2.00", "2.00"]
    assert lines[3].split()[-3:] == ["4.00", "4.00", "50%"]
