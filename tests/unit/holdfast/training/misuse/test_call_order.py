"""A script's calls out of order are refused, and a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.errors import BadInput, Uncommitted
from holdfast.training.misuse.call_order import TRIES, CallOrder


def outside() -> CallOrder:
    return CallOrder()


def between_steps() -> CallOrder:
    order = outside()
    order.enter()
    return order


def in_step(begun: int = 1) -> CallOrder:
    order = between_steps()
    for _ in range(begun):
        order.begin(0)
    return order


def after_commit() -> CallOrder:
    order = in_step()
    order.commit()
    order.committed()
    return order


@pytest.mark.parametrize(
    ("order", "call"),
    [
        (outside(), CallOrder.commit),
        (between_steps(), CallOrder.enter),
        (between_steps(), CallOrder.commit),
        (in_step(), CallOrder.enter),
        (in_step(TRIES), lambda order: order.begin(0)),
        (after_commit(), CallOrder.enter),
        (after_commit(), CallOrder.commit),
        (after_commit(), CallOrder.write),
    ],
)
def test_a_refused_call_changes_nothing(order: CallOrder, call: Callable[[CallOrder], None]) -> None:
    before = dict(vars(order))
    with pytest.raises(BadInput):
        call(order)
    assert vars(order) == before


def test_a_step_that_begins_too_often_stays_refused_until_its_loop_ends() -> None:
    order = in_step(TRIES)
    for _ in range(2):
        with pytest.raises(Uncommitted, match=f"step 0 began {TRIES} times without a commit"):
            order.begin(0)
    order.leave()
    order.enter()
    order.begin(0)
