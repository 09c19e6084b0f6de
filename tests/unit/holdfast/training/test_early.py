from __future__ import annotations

import pytest

from holdfast.training.private_exchange import WATCHED, Early


def step(early: Early, passes: int, final: bool = True) -> list[bool]:
    """Do one step and return what each forward pass was told."""
    early.begin()
    told = [early.passed() for _ in range(passes)]
    early.found(final)
    return told


@pytest.fixture(params=[1, 3])
def passes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def early(passes: int) -> Early:
    """One that has watched enough."""
    early = Early()
    for _ in range(WATCHED):
        assert not early.known
        assert all(step(early, passes)), "while it is watched every pass is looked at"
    return early


def test_what_is_final_after_the_same_pass_is_sent_after_that_one(early: Early, passes: int) -> None:
    assert early.known
    assert step(early, passes) == [False] * (passes - 1) + [True]


def test_a_pass_more_or_less_ends_it(early: Early, passes: int) -> None:
    step(early, passes + 1)
    assert not early.known
    assert step(early, passes) == [False] * passes


def test_a_state_that_was_not_final_ends_it(early: Early, passes: int) -> None:
    step(early, passes, final=False)
    assert not early.known
    assert step(early, passes) == [False] * passes


def test_a_step_without_passes_teaches_nothing(early: Early, passes: int) -> None:
    step(early, 0, final=False)
    assert early.known


def test_a_step_that_is_begun_again_counts_anew(early: Early, passes: int) -> None:
    early.begin()
    early.passed()
    assert step(early, passes) == [False] * (passes - 1) + [True]


def test_passes_that_vary_from_the_start_are_never_known() -> None:
    early = Early()
    for at in range(4 * WATCHED):
        step(early, 1 + at % 2)
        assert not early.known


def test_one_odd_step_while_it_is_watched_starts_the_count_anew() -> None:
    early = Early()
    for passes in (1, 2, *[2] * (WATCHED - 2)):
        step(early, passes)
    assert not early.known
    step(early, 2)
    assert early.known
