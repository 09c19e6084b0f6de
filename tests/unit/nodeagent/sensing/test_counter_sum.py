from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sensing.counter_sum import CounterSum


def growth(readings: list[int | None]) -> int:
    """Return the growth of the known readings, which never fall."""
    known = [each for each in readings if each is not None]
    assert known == sorted(known)
    return sum(b - a for a, b in pairwise(known))


def test_the_sum_grows_by_the_growth_of_the_counters() -> None:
    total = CounterSum()
    assert total.add({"a": 5, "b": 1}) == 6
    assert total.add({"a": 7, "b": 2}) == 9


def test_a_counter_that_is_unreadable_once_adds_no_growth_when_it_returns() -> None:
    total = CounterSum()
    assert growth([total.add({"a": 5, "b": b}) for b in (3, None, 3)]) == 0


def test_the_growth_of_a_counter_while_it_was_unreadable_is_counted() -> None:
    total = CounterSum()
    assert growth([total.add({"a": 5, "b": b}) for b in (3, None, 4)]) == 1


def test_a_counter_that_appears_later_counts_from_its_first_reading() -> None:
    total = CounterSum()
    assert [total.add(each) for each in ({"a": 5}, {"a": 5, "b": 9}, {"a": 5, "b": 10})] == [5, 5, 6]


def test_a_counter_that_disappears_and_returns_adds_no_growth() -> None:
    total = CounterSum()
    readings = [total.add(each) for each in ({"a": 5, "b": 9}, {"a": 5}, {"a": 5, "b": 9})]
    assert growth(readings) == 0


def test_a_counter_that_restarts_counts_from_there_and_does_not_lower_the_sum() -> None:
    total = CounterSum()
    assert [total.add({"a": a, "b": 4}) for a in (5, 0, 1)] == [9, 9, 10]


def test_without_readable_counters_there_is_no_reading() -> None:
    assert CounterSum().add({}) is None
    assert CounterSum().add({"a": None}) is None


def test_a_sum_continues_after_a_restart_of_the_agent() -> None:
    total = CounterSum()
    before = [total.add(each) for each in ({"a": 5}, {"a": 5, "b": 2000}, {"a": 6, "b": 2000})]
    total = CounterSum.load(json.loads(json.dumps(total.dump())))
    assert growth([*before, total.add({"a": 6, "b": 2001})]) == 2


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.dictionaries(st.sampled_from(["total", "last", "a"]), inner),
))  # fmt: skip
def test_a_malformed_sum_is_ignored(raw: object) -> None:
    found = CounterSum.load(raw)
    assert CounterSum.load(found.dump()).dump() == found.dump()
    assert isinstance(found.add({"a": 5}), int)


STEP = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0, 0, 0, 1, None]), max_size=3)


@given(st.lists(STEP, max_size=30))
def test_the_sum_never_grows_by_more_than_the_counters_do(steps: list[dict[str, int | None]]) -> None:
    total, real = CounterSum(), dict.fromkeys("abc", 100)
    readings, grown = [], 0
    for step in steps:
        for name, more in step.items():
            real[name] += more or 0
            grown += more or 0
        readings.append(total.add({n: None if step[n] is None else real[n] for n in step}))
    assert growth(readings) <= grown
