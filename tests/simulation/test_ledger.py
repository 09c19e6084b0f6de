from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.observability.ledger import Bucket, Ledger

S = 1_000_000_000
ACTIVITIES = st.sampled_from([each for each in Bucket if each not in (Bucket.LOST, Bucket.UNKNOWN)])
STEPS = st.integers(0, 12)
PASSED = st.integers(0, 3000 * S)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), PASSED, ACTIVITIES),
        st.tuples(st.just("advance"), PASSED, st.none()),
        st.tuples(st.just("trained"), PASSED, STEPS),
        st.tuples(st.just("warmed"), PASSED, STEPS),
        st.tuples(st.just("secured"), PASSED, STEPS),
        st.tuples(st.just("rolled_back"), PASSED, STEPS),
        st.tuples(st.just("noticed"), PASSED, st.integers(0, 5000 * S)),
        st.tuples(st.just("restarted"), PASSED, st.none()),
        st.tuples(st.just("begun_again"), PASSED, st.none()),
        st.tuples(st.just("finished"), PASSED, st.none()),
        st.tuples(st.just("backwards"), PASSED, st.none()),
    ),
    max_size=60,
)


def again(ledger: Ledger) -> Ledger:
    return Ledger.restore(json.loads(json.dumps(ledger.snapshot())))


def play(ledger: Ledger, now_ns: int, verb: str, detail: Any) -> Ledger:
    """Carry out one event; `now_ns` is its time."""
    match verb:
        case "enter":
            ledger.enter(detail, now_ns)
        case "advance":
            ledger.advance(now_ns)
        case "trained":
            ledger.trained(detail, now_ns)
        case "warmed":
            ledger.trained(detail, now_ns, usual_ns=5 * S)
        case "secured":
            ledger.advance(now_ns)
            ledger.secured(detail)
        case "rolled_back":
            ledger.rolled_back(detail, now_ns)
        case "noticed":
            ledger.noticed(now_ns - detail, now_ns)
        case "begun_again":
            ledger.begun_again(now_ns)
        case "finished":
            ledger.finished(now_ns)
        case "restarted":
            ledger = again(ledger)
            ledger.advance(now_ns)
    return ledger


def holds(ledger: Ledger, clock_ns: int) -> None:
    buckets = ledger.buckets_ns()
    assert sum(buckets.values()) + ledger.pending_ns == ledger.total_ns == clock_ns
    assert all(spent >= 0 for spent in buckets.values())
    assert ledger.pending_ns >= 0
    assert ledger.good_ns == buckets[Bucket.PRODUCTIVE] + ledger.pending_ns


@given(opened_ns=st.integers(0, 10**19), events=EVENTS)
@settings(max_examples=300)
def test_in_any_history_the_buckets_add_up_to_the_clock_and_never_decrease(
    opened_ns: int, events: list[tuple[str, int, Any]]
) -> None:
    ledger, now_ns = Ledger(opened_ns), opened_ns
    for verb, passed_ns, detail in events:
        before, counted = ledger.snapshot(), ledger.buckets_ns()
        if verb == "backwards":
            refuses_the_past(ledger, ledger.at_ns - 1)
            assert ledger.snapshot() == before
            continue
        now_ns += passed_ns
        ledger = play(ledger, now_ns, verb, detail)
        holds(ledger, now_ns - opened_ns)
        assert all(ledger.buckets_ns()[bucket] >= spent for bucket, spent in counted.items())
        for ratio in (ledger.ettr(), ledger.ettr_over(3600, now_ns)):
            assert (ratio is None) == (ledger.buckets_ns()[Bucket.UNKNOWN] > 0)
            assert ratio is None or 0 <= ratio <= 1
        assert again(ledger).snapshot() == ledger.snapshot()


def refuses_the_past(ledger: Ledger, at_ns: int) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: ledger.advance(at_ns),
        lambda: ledger.enter(Bucket.STOP, at_ns),
        lambda: ledger.trained(3, at_ns),
        lambda: ledger.rolled_back(3, at_ns),
        lambda: ledger.begun_again(at_ns),
        lambda: ledger.finished(at_ns),
        lambda: ledger.noticed(at_ns, at_ns),
        lambda: ledger.ettr_over(60, at_ns),
    )
    for call in calls:
        with pytest.raises(ValueError, match="backwards"):
            call()


@given(events=EVENTS, more=EVENTS)
@settings(max_examples=150)
def test_a_restored_ledger_continues_like_the_saved_one(
    events: list[tuple[str, int, Any]], more: list[tuple[str, int, Any]]
) -> None:
    ledger, now_ns = Ledger(0), 0
    for verb, passed_ns, detail in events:
        now_ns += passed_ns
        ledger = play(ledger, now_ns, verb, detail)
    other = again(ledger)
    for verb, passed_ns, detail in more:
        now_ns += passed_ns
        ledger, other = play(ledger, now_ns, verb, detail), play(other, now_ns, verb, detail)
        assert other.snapshot() == ledger.snapshot()
