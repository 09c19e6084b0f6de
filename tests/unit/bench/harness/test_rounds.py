from __future__ import annotations

from collections.abc import Callable

from bench.harness.rounds import UNCOUNTED, take_turns


def test_calls_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[], float | None]:
        def run() -> float | None:
            order.append(name)
            return float(len(order))

        return run

    took = take_turns({"a": call("a"), "b": call("b")}, 2)
    assert order == ["a", "b"] * (2 + UNCOUNTED)
    assert took == {"a": [5.0, 7.0], "b": [6.0, 8.0]}


def test_calls_that_could_not_be_done_are_omitted() -> None:
    assert take_turns({"a": lambda: None}, 3) == {"a": []}


def test_the_given_call_runs_between_the_measured_ones() -> None:
    seen: list[str] = []
    take_turns({"a": lambda: seen.append("a")}, 1, lambda: seen.append("between"))
    assert seen == ["between", "a"] * (UNCOUNTED + 1)
