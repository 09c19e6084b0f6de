"""After each entry, the ledger has exactly this snapshot, and its windows have exactly these shares."""

from __future__ import annotations

import re
from typing import Any

import pytest

from supervisor.observability.ledger import DAY_NS, HOUR_NS, MAX_PENDING, Bucket, Ledger, Window

S = 1_000_000_000


def books(activity: str = "productive", **given: Any) -> dict[str, Any]:
    """Return a snapshot of a ledger that was opened at 0 s; the times of buckets and steps are in seconds."""
    settled = {bucket.value: given.pop(bucket.value, 0) * S for bucket in Bucket}
    at_s = given.pop("at_s", 0)
    return {
        "format": 1,
        "opened_ns": 0,
        "at_ns": at_s * S,
        "stretch_ns": given.pop("stretch_s", at_s) * S,
        "activity": activity,
        "settled_ns": settled,
        "pending": [[first, last, took * S] for first, last, took in given.pop("pending", ())],
        "tail_ns": given.pop("tail_s", 0) * S,
        "secured_step": given.pop("secured", None),
        **given,
    }


def shown(ledger: Ledger) -> dict[str, Any]:
    found = ledger.snapshot()
    del found["hour"], found["day"]
    assert Ledger.restore(ledger.snapshot()).snapshot() == ledger.snapshot()
    return found


def training(*ends_s: int) -> Ledger:
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    for step, end_s in enumerate(ends_s, 1):
        ledger.trained(step, end_s * S)
    return ledger


def test_time_that_passes_is_added_to_the_present_bucket() -> None:
    ledger = Ledger(0)
    assert shown(ledger) == books("queued")
    ledger.enter(Bucket.START, 3 * S)
    assert shown(ledger) == books("start", at_s=3, queued=3)
    ledger.advance(5 * S)
    assert shown(ledger) == books("start", at_s=5, stretch_s=3, queued=3, start=2)
    ledger.enter(Bucket.START, 6 * S)
    assert shown(ledger) == books("start", at_s=6, stretch_s=3, queued=3, start=3), "the same activity"
    ledger.enter(Bucket.PRODUCTIVE, 6 * S)
    ledger.advance(9 * S)
    assert shown(ledger) == books(at_s=9, stretch_s=6, queued=3, start=3, tail_s=3)
    with pytest.raises(ValueError, match=re.escape(f"clock went backwards: {9 * S} to {8 * S} ns")):
        ledger.advance(8 * S)
    assert (ledger.pending_ns, ledger.total_ns, ledger.good_ns, ledger.at_ns) == (3 * S, 9 * S, 3 * S, 9 * S)


def test_trained_steps_are_pending_with_the_time_that_they_took() -> None:
    assert shown(training(2, 5)) == books(at_s=5, pending=((1, 1, 2), (2, 2, 3)))
    twice = training(2, 5)
    twice.trained(1, 6 * S)
    assert shown(twice) == books(at_s=6, pending=((1, 1, 2), (2, 2, 4)))
    thrice = training(2, 5, 9)
    thrice.trained(3, 10 * S)
    assert shown(thrice) == books(at_s=10, pending=((1, 1, 2), (2, 2, 3), (3, 3, 5)))
    first = Ledger(0, Bucket.PRODUCTIVE)
    first.trained(1, 5 * S, 2 * S)
    assert shown(first) == books(at_s=5, pending=((1, 1, 2),), warmup=3)
    first.trained(2, 7 * S, 2 * S)
    assert shown(first) == books(at_s=7, pending=((1, 1, 2), (2, 2, 2)), warmup=3)
    first.trained(3, 8 * S, -5)
    assert shown(first) == books(at_s=8, pending=((1, 1, 2), (2, 2, 2), (3, 3, 0)), warmup=4)
    first.secured(3)
    first.trained(3, 9 * S)
    assert shown(first) == books(at_s=9, productive=5, warmup=4, secured=3)


def test_secured_steps_are_productive_and_rolled_back_ones_are_lost() -> None:
    ledger = training(1, 3, 6)
    ledger.secured(2)
    assert shown(ledger) == books(at_s=6, pending=((3, 3, 3),), productive=3, secured=2)
    ledger.secured(1)
    assert shown(ledger) == books(at_s=6, pending=((3, 3, 3),), productive=3, secured=2)
    ledger.rolled_back(2, 8 * S)
    assert shown(ledger) == books(at_s=8, stretch_s=6, productive=3, lost=5, secured=2)
    ledger.rolled_back(1, 8 * S)
    assert shown(ledger) == books(at_s=8, stretch_s=6, productive=3, lost=5, secured=1)


def test_time_is_divided_evenly_among_the_steps_that_were_caught_up_with() -> None:
    ledger = training(1)
    ledger.caught_up(5, 9 * S)
    assert shown(ledger) == books(at_s=9, pending=((1, 1, 1), (2, 5, 8)))
    ledger.secured(3)
    assert shown(ledger) == books(at_s=9, pending=((4, 5, 4),), productive=5, secured=3)
    ledger.rolled_back(4, 9 * S)
    assert shown(ledger) == books(at_s=9, pending=((4, 4, 2),), productive=5, lost=2, secured=3)
    ledger.caught_up(4, 10 * S)
    assert shown(ledger) == books(
        at_s=10, stretch_s=9, pending=((4, 4, 2),), tail_s=1, productive=5, lost=2, secured=3
    )
    ledger.secured(4)
    ledger.caught_up(6, 12 * S)
    assert shown(ledger) == books(at_s=12, pending=((5, 6, 3),), productive=7, lost=2, secured=4)
    ledger.caught_up(9, 12 * S)
    assert shown(ledger)["pending"] == [[5, 6, 3 * S]], "no time has passed"
    unknown = Ledger(0, Bucket.PRODUCTIVE)
    unknown.caught_up(5, 9 * S)
    assert shown(unknown) == books(at_s=9, stretch_s=0, tail_s=9)
    zeroth = training()
    zeroth.trained(0, 2 * S)
    zeroth.caught_up(1, 3 * S)
    assert shown(zeroth) == books(at_s=3, pending=((0, 0, 2), (1, 1, 1)))


@pytest.mark.parametrize(
    ("since_s", "detect", "tail_s"),
    [(7, 2, 2), (0, 4, 0), (9, 0, 4), (12, 0, 4), (5, 4, 0), (6, 3, 1)],
)
def test_detection_time_begins_at_the_first_symptom_within_the_step_in_progress(
    since_s: int, detect: int, tail_s: int
) -> None:
    ledger = training(5)
    ledger.noticed(since_s * S, 9 * S)
    assert shown(ledger) == books("detect", at_s=9, pending=((1, 1, 5),), detect=detect, tail_s=tail_s)
    ledger.noticed(0, 11 * S)
    assert shown(ledger) == books("detect", at_s=11, pending=((1, 1, 5),), detect=detect + 2, tail_s=tail_s)


def test_pending_time_is_productive_at_the_end_and_unknown_after_a_new_beginning() -> None:
    ledger = training(5)
    ledger.secured(0)
    ledger.begun_again(7 * S)
    assert shown(ledger) == books(at_s=7, stretch_s=5, unknown=7)
    ledger.trained(1, 8 * S)
    ledger.finished(9 * S)
    assert shown(ledger) == books(at_s=9, stretch_s=8, unknown=7, productive=2)


def test_beyond_a_limit_the_oldest_pending_steps_are_merged_in_pairs() -> None:
    ledger = training(*range(1, MAX_PENDING + 1))
    pending = shown(ledger)["pending"]
    assert (len(pending), pending[0]) == (MAX_PENDING, [1, 1, S])
    ledger.trained(MAX_PENDING + 1, (MAX_PENDING + 1) * S)
    pending = shown(ledger)["pending"]
    half = MAX_PENDING // 2
    assert len(pending) == MAX_PENDING + 1 - half // 2
    assert pending[0] == [1, 2, 2 * S]
    assert pending[half // 2 - 1 : half // 2 + 1] == [[half - 1, half, 2 * S], [half + 1, half + 1, S]]
    assert pending[-1] == [MAX_PENDING + 1, MAX_PENDING + 1, S]


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ("text", "ledger: expected an object, got str"),
        ({**training(3).snapshot(), "format": 2}, "ledger: format 2; expected 1"),
        ({**training(3).snapshot(), "tail_ns": None}, "ledger: tail_ns is None; expected an integer"),
        ({**training(3).snapshot(), "opened_ns": True}, "ledger: opened_ns is True; expected an integer"),
        ({**training(3).snapshot(), "stretch_ns": 1.5}, "ledger: stretch_ns is 1.5; expected an integer"),
        ({**training(3).snapshot(), "tail_ns": 1}, "ledger: the buckets do not add up to the clock"),
        ({**training(3).snapshot(), "hour": 3}, "ledger window: expected a list, got int"),
        ({**training(3).snapshot(), "day": [[2, 0], [1, 0]]}, "ledger window: not in chronological order"),
        ({**training(3).snapshot(), "pending": [[1, 2]]}, "ledger: incomplete: "),
    ],
)
def test_the_refusal_of_a_snapshot_names_its_defect(state: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
        Ledger.restore(state)


def test_samples_at_one_time_are_in_order_whatever_their_values() -> None:
    window = Window(10, 3)
    window.restore([[5, 9], [5, 2], [7, 1]])
    assert window.snapshot() == [[5, 9], [5, 2], [7, 1]]


def test_ettr_is_the_share_of_productive_time() -> None:
    ledger = training(5)
    assert ledger.ettr() == 1.0
    ledger.enter(Bucket.QUEUED, 5 * S)
    ledger.advance(20 * S)
    assert (ledger.ettr(), ledger.ettr(3 * S)) == (0.25, 0.25)
    ledger.enter(Bucket.PRODUCTIVE, 20 * S)
    ledger.advance(40 * S)
    assert (ledger.ettr(), ledger.ettr(10 * S), ledger.ettr(99 * S)) == (25 / 40, 15 / 40, 5 / 40)
    assert (ledger.ettr(-5 * S), Ledger(7).ettr()) == (25 / 40, 0.0)


def test_a_window_keeps_one_sample_per_period_and_forgets_old_ones() -> None:
    window = Window(10, 3)
    assert (window.width_ns, window.snapshot(), window.share(30, 40, 40)) == (30, [], 0.0)
    window.advance(4, 25, 100, True)
    assert window.snapshot() == [[4, 100], [10, 106], [20, 116]]
    window.advance(25, 40, 121, False)
    assert window.snapshot() == [[4, 100], [10, 106], [20, 116], [30, 121], [40, 121]]
    window.advance(40, 59, 121, True)
    assert window.snapshot() == [[10, 106], [20, 116], [30, 121], [40, 121], [50, 131]]
    window.advance(59, 1000, 140, False)
    assert window.snapshot() == [[960, 140], [970, 140], [980, 140], [990, 140], [1000, 140]]


@pytest.mark.parametrize(
    ("width", "at", "good", "share"),
    [
        (10, 30, 20, 0.5),  # from 15 at time 20 to 20 at time 30
        (15, 30, 20, 10 / 15),  # from 10, halfway between the samples
        (100, 30, 20, 2 / 3),  # only 30 are covered
        (5, 35, 25, 1.0),
        (10, 30, 40, 1.0),
        (10, 30, 2, 0.0),
        (10, 0, 20, 0.0),
        (0, 30, 20, 0.0),
        (10, 40, 30, 1.0),
        (10, 25, 16, 0.6),
    ],
)
def test_the_share_of_a_window_is_interpolated_between_its_samples(
    width: int, at: int, good: int, share: float
) -> None:
    window = Window(10, 3)
    window.restore([[0, 0], [10, 5], [20, 15], [30, 20]])
    assert window.share(width, at, good) == pytest.approx(share)


def test_the_last_hour_is_more_exact_than_the_last_day() -> None:
    """Samples are a minute apart for the last hour, and a quarter of an hour apart for the last day."""
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    ledger.enter(Bucket.QUEUED, 90_000 * S)
    now_ns = 93_700 * S
    ledger.advance(now_ns)
    hour, day = ledger.snapshot()["hour"], ledger.snapshot()["day"]
    assert (len(hour), len(day)) == (62, 98)
    assert (hour[0], hour[-1]) == ([90_000 * S, 90_000 * S], [93_660 * S, 90_000 * S])
    assert (day[0], day[-1]) == ([6_300 * S, 6_300 * S], [93_600 * S, 90_000 * S])
    assert ledger.ettr_over(3600, now_ns) == 0.0
    assert ledger.ettr_over(86_400, now_ns) == pytest.approx((90_000 - 7_300) / 86_400)
    assert ledger.ettr_over(10**6, now_ns) == ledger.ettr_over(86_400, now_ns), "at most a day"
    assert (HOUR_NS, DAY_NS) == (3600 * S, 86_400 * S)


def test_a_fault_late_in_a_quarter_of_an_hour_is_in_the_last_hour_at_its_time() -> None:
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    ledger.enter(Bucket.QUEUED, 7_740 * S)
    ledger.enter(Bucket.PRODUCTIVE, 7_800 * S)
    ledger.advance(11_400 * S)
    assert ledger.ettr_over(3600, 11_400 * S) == 1.0, "the minute before it is exact"
