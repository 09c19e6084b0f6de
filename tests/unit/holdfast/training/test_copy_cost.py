"""The expected cost of the next copy is the lowest cost of a copy of the same kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.protection.snapshot_schedule import OTHER_KIND, CopyCost

_shares = st.floats(0.0, 1.0)
_costs = st.floats(0.001, 100.0)


def test_nothing_is_expected_before_the_first_copy() -> None:
    assert CopyCost().seconds == 0.0


def test_the_lowest_cost_of_equal_copies_is_expected() -> None:
    cost = CopyCost()
    for took_s, expected_s in ((2.0, 2.0), (3.0, 2.0), (1.5, 1.5)):
        cost = cost.after(took_s, coming=1.0, share=1.0, whole=True, read=1.0)
        assert cost == CopyCost(expected_s, 1.0, True, 1.0)


@pytest.mark.parametrize(
    ("share", "whole", "read"),
    [(0.6, True, 0.5), (0.5, False, 0.5), (0.5, True, 0.5 + 1.5 * OTHER_KIND)],
    ids=["less is frozen", "tensors are skipped", "another share is read"],
)
def test_another_kind_of_copy_is_measured_again(share: float, whole: bool, read: float) -> None:
    known = CopyCost(1.0, share=0.5, whole=True, read=0.5)
    assert known.after(9.0, read, share, whole, read) == CopyCost(9.0, share, whole, read)


def test_a_copy_with_more_frozen_tensors_is_of_the_same_kind() -> None:
    known = CopyCost(1.0, share=0.5, whole=True, read=0.5)
    assert known.after(9.0, 0.5, 0.4, True, 0.5 + 0.5 * OTHER_KIND).seconds == 1.0


def test_the_cost_of_a_first_copy_is_reduced_to_what_later_copies_will_read() -> None:
    assert CopyCost().after(8.0, coming=0.25, share=0.25, whole=True, read=1.0).seconds == 2.0
    assert CopyCost().after(8.0, coming=0.5, share=0.5, whole=True, read=0.25).seconds == 8.0  # never more
    assert CopyCost().after(8.0, coming=0.5, share=0.5, whole=True, read=0.0).seconds == 8.0


@given(st.lists(st.tuples(_costs, _shares, _shares, st.booleans(), _shares), min_size=1))
def test_the_newest_copy_bounds_the_cost_and_determines_its_kind(
    copies: list[tuple[float, float, float, bool, float]],
) -> None:
    cost = CopyCost()
    for took_s, coming, share, whole, read in copies:
        cost = cost.after(took_s, coming, share, whole, read)
        assert 0.0 <= cost.seconds <= took_s
        assert (cost.share, cost.whole, cost.read) == (share, whole, read)
