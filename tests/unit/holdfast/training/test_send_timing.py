"""A rank may send its private state before the optimizer runs, after the pass known to be the last."""

from __future__ import annotations

import pytest

from holdfast.training.protection.private_backup import LEARNING_STEPS, SendTiming


def step(early: SendTiming, passes: int, final: bool = True) -> list[bool]:
    """Do one step, and return the decision after each forward pass."""
    early.begin()
    answers = [early.after_forward() for _ in range(passes)]
    early.learn(final)
    return answers


@pytest.fixture(params=[1, 3])
def passes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def early(passes: int) -> SendTiming:
    """Return a timing that has observed enough steps."""
    early = SendTiming()
    for _ in range(LEARNING_STEPS):
        assert not early.may_send_early
        assert all(step(early, passes)), "every pass must be timed while the sends are being watched"
    return early


def test_state_that_is_final_after_a_fixed_pass_is_sent_after_that_pass(
    early: SendTiming, passes: int
) -> None:
    assert early.may_send_early
    assert step(early, passes) == [False] * (passes - 1) + [True]


def test_one_pass_more_or_less_ends_early_sending(early: SendTiming, passes: int) -> None:
    step(early, passes + 1)
    assert not early.may_send_early
    assert step(early, passes) == [False] * passes


def test_a_state_that_was_not_final_ends_early_sending(early: SendTiming, passes: int) -> None:
    step(early, passes, final=False)
    assert not early.may_send_early
    assert step(early, passes) == [False] * passes


def test_a_step_without_passes_is_not_learned(early: SendTiming, passes: int) -> None:
    step(early, 0, final=False)
    assert early.may_send_early


def test_a_repeated_step_restarts_the_count(early: SendTiming, passes: int) -> None:
    early.begin()
    early.after_forward()
    assert step(early, passes) == [False] * (passes - 1) + [True]


def test_passes_that_vary_from_the_start_never_allow_early_sending() -> None:
    early = SendTiming()
    for at in range(4 * LEARNING_STEPS):
        step(early, 1 + at % 2)
        assert not early.may_send_early


def test_one_odd_step_during_the_observation_restarts_the_count() -> None:
    early = SendTiming()
    for passes in (1, 2, *[2] * (LEARNING_STEPS - 2)):
        step(early, passes)
    assert not early.may_send_early
    step(early, 2)
    assert early.may_send_early
