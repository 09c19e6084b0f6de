from __future__ import annotations

import math

from bench.verdicts import Verdict, all_met, at_most, below


def test_a_limit_may_be_reached_but_not_exceeded() -> None:
    assert at_most("t", 0.3, 0.3, "").met is True
    assert at_most("t", 0.31, 0.3, "").met is False
    assert below("t", 0.3, 0.3, "").met is False
    assert below("t", 0.29, 0.3, "").met is True


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert at_most("t", math.nan, 1, "").met is None
    assert below("t", math.nan, 1, "").met is None
    assert all_met([Verdict("a", "", None), Verdict("b", "", True)])


def test_a_missed_target_says_so_in_capitals() -> None:
    missed = Verdict("median <= 0.3 s", "0.400 s", False)
    assert missed.line == "MISSED  median <= 0.3 s: 0.400 s"
    assert not all_met([missed])
