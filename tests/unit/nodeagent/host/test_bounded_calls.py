from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from nodeagent.host import bounded_calls
from nodeagent.host.bounded_calls import BoundedCalls

ANSWER_S = 0.2
PATIENCE_S = 20.0


@contextmanager
def hanging() -> Iterator[tuple[Callable[[], str], threading.Event]]:
    """Yield a call that does not return before the event is set, and the event."""
    answers = threading.Event()

    def call() -> str:
        assert answers.wait(PATIENCE_S)
        return "late"

    try:
        yield call, answers
    finally:
        answers.set()


def hung(calls: BoundedCalls[str], *keys: str) -> list[str]:
    return [each for each in keys if calls.hung_s(each) is not None]


def test_calls_that_hang_delay_no_other_call_and_are_not_repeated() -> None:
    calls = BoundedCalls[str](ANSWER_S)
    made: list[str] = []

    def good() -> str:
        made.append("c")
        return "good"

    with hanging() as (first, first_answers), hanging() as (second, _):
        asked = {"a": first, "b": second, "c": good}
        assert calls.run(asked) == {"c": "good"}
        assert hung(calls, *asked) == ["a", "b"]
        for _again in range(3):
            assert calls.run(asked) == {"c": "good"}
        assert made == ["c"] * 4
        assert sum(each.name == "file-systems" for each in threading.enumerate()) == 2
        first_answers.set()
        while hung(calls, "a"):
            pass
        assert calls.run(asked) == {"a": "late", "c": "good"}


def test_the_time_of_a_call_that_hangs_grows() -> None:
    calls = BoundedCalls[str](ANSWER_S)
    with hanging() as (call, _):
        calls.run({"a": call})
        before = calls.hung_s("a")
        calls.run({"a": call})
        after = calls.hung_s("a")
        assert before is not None
        assert after is not None
        assert after > before >= ANSWER_S


def test_slow_calls_are_no_hang_even_if_all_of_them_together_take_long() -> None:
    calls = BoundedCalls[str](ANSWER_S)

    def slow() -> str:
        threading.Event().wait(0.6 * ANSWER_S)
        return "slow"

    asked = dict.fromkeys("abcdef", slow)
    assert calls.run(asked) == dict.fromkeys("abcdef", "slow")
    assert not hung(calls, *asked)


def test_beyond_the_limit_of_hanging_calls_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_calls, "MAX_HUNG", 2)
    calls = BoundedCalls[str](ANSWER_S)
    with hanging() as (call, _):
        calls.run(dict.fromkeys("ab", call))
        assert calls.run({"c": lambda: "good"}) == {}
    assert hung(calls, "c") == []


def test_without_another_thread_the_calls_are_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert BoundedCalls[str](ANSWER_S).run({"a": lambda: "good"}) == {"a": "good"}
