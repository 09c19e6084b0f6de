"""After any number of steps, the store holds the private states of the right steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol import kept_steps

steps = st.integers(0, 2**26)


def held_after(last: int, every: int, first: int = 0) -> set[int]:
    """Return the steps held after the steps from `first` to `last` were stored in order."""
    places: dict[int, int] = {}
    for step in range(first, last + 1):
        for place in kept_steps.places(step, every):
            assert 0 <= place < kept_steps.count(every)
            places[place] = step
    return set(places.values())


@given(st.integers(0, 3000), st.integers(0, 2500))
def test_the_last_three_steps_and_the_last_four_multiples_of_powers_of_two_are_held(
    last: int, first: int
) -> None:
    held = held_after(last, 0, min(first, last))
    wanted = {last, last - 1, last - 2}
    for power in range(12):
        newest = last >> power << power
        wanted |= {newest - back * 2**power for back in range(4)}

    assert {step for step in wanted if step > min(first, last)} <= held


@given(st.integers(3, 3000), st.integers(0, 50), st.booleans())
def test_the_last_four_steps_are_held_for_a_host_that_is_a_step_ahead_of_its_devices(
    last: int, every: int, few: bool
) -> None:
    places: dict[int, int] = {}
    for step in range(max(0, last - 70), last + 1):
        places.update(dict.fromkeys(kept_steps.places(step, every, few=few), step))
    assert {last, last - 1, last - 2, last - 3} <= set(places.values())


@given(st.integers(0, 3000))
def test_step_zero_is_held_without_an_interval(last: int) -> None:
    assert 0 in held_after(last, 0)


@given(st.integers(1, 3000), st.integers(1, 400))
def test_the_last_four_multiples_of_every_are_held(last: int, every: int) -> None:
    newest = last // every * every
    held = held_after(last, every)
    assert {newest - back * every for back in range(4) if newest >= back * every} <= held


@given(st.integers(3, 3000), st.integers(0, 50))
def test_while_a_step_is_written_the_three_before_it_are_held(step: int, every: int) -> None:
    written = set(kept_steps.places(step, every))
    for before in (step - 1, step - 2, step - 3):
        assert set(kept_steps.places(before, every)) - written


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_any_step_has_a_slot(step: int, every: int) -> None:
    assert all(0 <= place < kept_steps.count(every) for place in kept_steps.places(step, every))


@given(st.integers(3, 3000), st.integers(0, 50))
def test_for_large_states_the_three_previous_steps_are_kept_while_a_step_is_written(
    step: int, every: int
) -> None:
    written = set(kept_steps.places(step, every, few=True))
    for before in (step - 1, step - 2, step - 3):
        assert set(kept_steps.places(before, every, few=True)) - written
