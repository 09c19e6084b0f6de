"""One member takes snapshots while steps become void, at a limited cost."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.protection.snapshot_replacement import SnapshotReplacement

EVERY = 32
STEPS = 640


class Member:
    """Takes snapshots by the interval and by `SnapshotReplacement`, as a rank does; forgets void steps."""

    def __init__(self, near: bool, own: AbstractSet[int], others: AbstractSet[int], lag: int = 5) -> None:
        """`own` steps become void after their work; the member learns of `others` `lag` steps later."""
        self.retake = SnapshotReplacement(near)
        self.own, self.others, self.lag = own, others, lag
        self.slots: list[int] = [0]
        self.extra = -1
        self.copies: list[int] = []

    def run(self, first: int, last: int) -> Member:
        for step in range(first, last + 1):
            self.step(step)
        return self

    def step(self, step: int) -> None:
        retake = self.retake
        heard = [each for each in self.slots if each in self.others and each + self.lag <= step]
        if heard and len(self.slots) > 1:
            self.slots.remove(heard[-1])
        retake.observe(step, self.slots, EVERY)
        due = step % EVERY == 0
        if due:
            retake.interval_due()
        if due or retake.is_common(step):
            self.copy(step)
        elif retake.is_due(step) and step not in self.own:
            self.copy(step)
            if retake.is_extra:
                self.extra = step
        if step in self.own and (step in self.slots or retake.is_due(step)):
            if step in self.slots:
                self.slots.remove(step)
                retake.forgot(self.slots)
            retake.voided(step, EVERY)

    def copy(self, step: int) -> None:
        if len(self.slots) == 2:
            self.slots.remove(self.extra if self.extra in self.slots else min(self.slots))
        self.slots.append(step)
        self.copies.append(step)
        self.retake.made(step, self.slots)


void = st.sets(st.integers(1, STEPS))


@given(void)
def test_after_a_void_step_the_next_one_that_is_not_void_is_copied_and_no_copy_is_wasted(
    own: set[int],
) -> None:
    member = Member(True, own, set())
    for step in range(1, STEPS + 1):
        member.step(step)
        due = step - step % EVERY
        good = next((each for each in range(due, step + 1) if each not in own), None)
        assert max(member.slots) >= (good if good is not None else 0)
        assert not own & set(member.slots)
    assert len(member.copies) <= 2 * (STEPS // EVERY)
    assert all(step % EVERY == 0 for step in member.copies if step in own)


def test_if_each_step_is_void_no_copies_are_made_besides_those_of_the_interval() -> None:
    member = Member(True, set(range(STEPS + 1)), set()).run(1, STEPS)
    assert member.copies == list(range(EVERY, STEPS + 1, EVERY))


def test_if_each_due_snapshot_is_void_for_another_rank_a_replacement_is_still_made() -> None:
    member = Member(True, set(), set(range(EVERY, STEPS + 1, EVERY)))
    for step in range(1, STEPS + 1):
        member.step(step)
        usable = [each for each in member.slots if each % EVERY]
        assert max(usable, default=0) >= step - EVERY - member.lag
    assert member.copies == [*(n * EVERY + more for n in range(1, 20) for more in (0, 5)), STEPS]


def test_a_snapshot_that_another_rank_of_the_member_overwrites_is_not_lost() -> None:
    """The other rank reaches a pause, and copies, just before this rank has looked at its commit."""
    retake = SnapshotReplacement(True)
    for step, there in ((48, (0, 32)), (49, (0, 32)), (50, (32,)), (51, (50, 32)), (52, (50, 32))):
        retake.observe(step, there, EVERY)
        assert not retake.is_due(step)
    for step in (53, 54):
        retake.observe(step, (50,), EVERY)
    assert retake.is_due(54)


def test_if_each_step_is_void_for_another_rank_few_copies_are_wasted() -> None:
    member = Member(True, set(), set(range(STEPS + 1))).run(1, STEPS)
    assert len(member.copies) <= 4 * (STEPS // EVERY)


@pytest.mark.parametrize("period", range(2, 10))
def test_a_pattern_in_the_void_steps_does_not_prevent_snapshots(period: int) -> None:
    """This holds however few steps are not void for another rank, whose void steps are known within 11 steps.

    One or two ranks cause them. At 12 of the 32 steps of the interval, a period of 8 meets only void steps.
    """
    for good, lag in product(range(period), range(1, 12)):
        others = {step for step in range(STEPS + 1) if step % period != good}
        member = Member(True, set(), others, lag).run(1, STEPS)
        assert set(member.copies) - others, (good, lag)


@given(void, void, st.booleans())
def test_three_members_agree_on_a_step_that_is_kept_long_and_the_extra_copy_costs_no_other(
    own: set[int], both: set[int], equal: bool
) -> None:
    """The step is half an interval after the one that was due, unless it is void as well."""
    both |= set() if equal else own
    members = [Member(False, own | both, set()), Member(False, both, own - both, lag=2)]
    for step in range(1, STEPS + 1):
        for member in members:
            firm = {each for each in member.slots if each != member.extra}
            member.step(step)
            kept = set(member.slots)
            assert not firm - (own | both) or kept - {member.extra}
        half = step - EVERY // 2
        void = own | both
        if step > EVERY and half % EVERY == 0 and half in void and step not in void:
            assert all(step in member.slots for member in members)
