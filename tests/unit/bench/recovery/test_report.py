from __future__ import annotations

import math
from typing import Any

import pytest

from bench.recovery import report
from bench.recovery.turns import Kill, Turn

MARKS = (
    ("fault", 0.0), ("noticed", 0.002), ("secured", 0.042), ("decided", 0.042), ("started", 0.06),
    ("joined", 0.07), ("restored", 0.09), ("first step", 0.1),
)  # fmt: skip


def incident(lost: int = 0) -> dict[str, Any]:
    return {"timeline": [{"what": what, "at_s": at_s} for what, at_s in MARKS], "lost_steps": lost}


def turn(mode: str, *took_s: float | None, redone: int = 0) -> Turn:
    kills = [
        Kill(
            mode, number, 0, 1, 10, 0,
            outcome="hung" if each is None else "recovered",
            took_s=each,
            redone=None if each is None else redone,
            incident=incident() if mode == "holdfast" else None,
        )
        for number, each in enumerate(took_s)
    ]  # fmt: skip
    buckets = {"buckets_s": {"productive": 8.0}, "pending_s": 1.0, "total_s": 10.0}
    return Turn(mode, 5.0, kills, buckets if mode == "holdfast" else None)


GOOD = [
    turn("holdfast", 0.1, 0.2, 0.3),
    turn("torchrun", 3.0, None),
    turn("torchrun-fresh", 4.0, 4.0),
    turn("holdfast-unmodified", 0.5),
    turn("torchrun-unmodified", 4.0),
]


def test_the_parts_of_a_recovery_add_up_to_its_total() -> None:
    pieces = report.pieces_s(incident())
    assert list(pieces) == ["detect", "secure", "decide", "start", "join", "restore", "step"]
    assert sum(pieces.values()) == pytest.approx(0.1)
    assert (
        report.timeline(incident()) == "ms: detect 2 secure 40 decide 0 start 18 join 10 restore 20 step 10"
    )


def test_good_figures_meet_every_target() -> None:
    assert [each.met for each in report.verdicts(GOOD, 3)] == [True] * 7


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (turn("holdfast", 0.1, None, 0.3), "all of 3 kills"),
        (turn("holdfast", 0.1, 0.2), "all of 3 kills"),
        (turn("holdfast", 0.31, 0.31, 0.31), "median <= 0.3 s"),
        (turn("holdfast", 0.1, 0.2, 0.61), "worst <= 0.6 s"),
        (turn("holdfast", 0.1, 0.2, 0.3, redone=2), "at most one step"),
    ],
)
def test_each_target_can_be_missed(changed: Turn, missed: str) -> None:
    found = [each.target for each in report.verdicts([changed, *GOOD[1:]], 3) if each.met is False]
    assert len(found) == 1
    assert missed in found[0]


def test_an_unmodified_script_must_never_hang_and_must_be_faster_than_under_torchrun() -> None:
    slow = [*GOOD[:3], turn("holdfast-unmodified", 4.5, None), GOOD[4]]
    assert [each.met for each in report.verdicts(slow, 3)][-2:] == [False, False]


def test_without_torchrun_the_comparison_is_undecided() -> None:
    found = report.verdicts([GOOD[0]], 3)
    assert [each.met for each in found] == [True, True, True, None, True]


def test_the_table_counts_hangs_separately() -> None:
    text = "\n".join(report.lines(GOOD))
    row = next(line for line in text.splitlines() if line.startswith("torchrun "))
    assert row.split()[1:4] == ["2", "1", "1"]
    assert "ETTR of the holdfast runs: 90.00%" in text


def test_ettr_is_the_sum_over_all_turns_and_unknown_without_any() -> None:
    assert report.ettr_of([GOOD[0], turn("holdfast", 0.1)], "holdfast") == pytest.approx(0.9)
    assert math.isnan(report.ettr_of(GOOD, "torchrun"))


def test_the_summary_contains_each_mode() -> None:
    found = report.summaries(GOOD)
    assert found["torchrun"]["recovered"] == 1
    assert found["holdfast"]["took_s"]["median"] == 0.2


def test_ettr_is_unknown_if_one_turns_ettr_is_unknown() -> None:
    unknown = turn("holdfast", 0.1)
    assert unknown.status is not None
    unknown.status["ettr"] = None
    assert math.isnan(report.ettr_of([GOOD[0], unknown], "holdfast"))
