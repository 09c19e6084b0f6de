import json
from typing import Any

import pytest

from supervisor.observability.ledger import MAX_PENDING, Bucket, Ledger

S = 1_000_000_000


def training(steps: int, step_s: int = 1) -> Ledger:
    """Return a ledger with the steps 1 to `steps`, trained one after another from second 0."""
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    for step in range(1, steps + 1):
        ledger.trained(step, step * step_s * S)
    return ledger


def spent_s(ledger: Ledger) -> dict[str, float]:
    return {bucket.value: ns / S for bucket, ns in ledger.buckets_ns().items() if ns}


def test_a_crash_costs_the_step_in_progress_and_the_recovery() -> None:
    ledger = training(10)
    ledger.secured(10)
    ledger.noticed(since_ns=10 * S + S // 2, at_ns=11 * S)
    ledger.enter(Bucket.RESTORE, 12 * S)
    ledger.rolled_back(10, 13 * S)
    ledger.enter(Bucket.PRODUCTIVE, 13 * S)
    ledger.trained(11, 16 * S, usual_ns=1 * S)
    assert spent_s(ledger) == {
        "productive": 10, "lost": 0.5, "detect": 1.5, "restore": 1, "warmup": 2,
    }  # fmt: skip
    assert ledger.pending_ns == 1 * S
    assert ledger.ettr() == 11 / 16


def test_only_unsecured_steps_are_lost() -> None:
    ledger = training(10)
    ledger.secured(4)
    ledger.rolled_back(7, 10 * S)
    assert spent_s(ledger) == {"productive": 4, "lost": 3}
    assert ledger.pending_ns == 3 * S
    ledger.secured(7)
    assert spent_s(ledger) == {"productive": 7, "lost": 3}


def test_steps_trained_again_after_a_rollback_are_pending_again() -> None:
    ledger = training(10)
    ledger.secured(10)
    ledger.rolled_back(5, 10 * S)
    ledger.trained(6, 11 * S)
    assert spent_s(ledger) == {"productive": 10}
    ledger.rolled_back(5, 11 * S)
    assert spent_s(ledger) == {"productive": 10, "lost": 1}


def test_late_or_repeated_messages_have_the_same_result() -> None:
    ledger = training(3)
    ledger.secured(4)
    ledger.secured(4)
    ledger.secured(2)
    ledger.trained(4, 5 * S)
    ledger.trained(4, 6 * S)
    assert spent_s(ledger) == {"productive": 6}


def test_a_symptom_cannot_precede_the_step_in_progress() -> None:
    ledger = training(3)
    ledger.enter(Bucket.CHECKPOINT, 4 * S)
    ledger.enter(Bucket.PRODUCTIVE, 5 * S)
    ledger.noticed(since_ns=0, at_ns=7 * S)
    assert spent_s(ledger) == {"checkpoint": 1, "detect": 2}
    assert ledger.pending_ns == 4 * S
    assert ledger.activity is Bucket.DETECT


def test_time_without_a_supervisor_is_assigned_to_the_steps_that_were_done() -> None:
    ledger = Ledger.restore(json.loads(json.dumps(training(3).snapshot())))
    ledger.trained(50, 50 * S)
    ledger.secured(50)
    assert spent_s(ledger) == {"productive": 50}


def test_a_month_without_a_snapshot_stays_small_and_exact() -> None:
    ledger = training(20_000)
    assert len(json.dumps(ledger.snapshot())) < 60_000
    assert len(ledger.snapshot()["pending"]) <= MAX_PENDING
    ledger.rolled_back(19_900, 20_000 * S)
    assert spent_s(ledger) == {"lost": 100}
    ledger.secured(19_900)
    assert spent_s(ledger) == {"productive": 19_900, "lost": 100}


def test_windows_forget_old_samples_and_the_run_does_not() -> None:
    ledger = Ledger(0)
    ledger.enter(Bucket.PRODUCTIVE, 86_400 * S)
    ledger.trained(1, 88_200 * S)
    ledger.secured(1)
    now_ns = 88_200 * S
    assert ledger.ettr_over(1800, now_ns) == pytest.approx(1.0)
    assert ledger.ettr_over(3600, now_ns) == pytest.approx(0.5)
    assert ledger.ettr_over(86_400, now_ns) == pytest.approx(1800 / 86_400)
    assert ledger.ettr() == pytest.approx(1800 / 88_200)
    ledger.enter(Bucket.QUEUED, now_ns)
    assert ledger.ettr_over(3600, now_ns + 30 * 86_400 * S) == 0.0
    assert len(json.dumps(ledger.snapshot())) < 10_000


def test_a_window_of_a_young_run_is_the_run() -> None:
    ledger = Ledger(5 * S)
    assert ledger.ettr() == ledger.ettr_over(3600, 5 * S) == 0.0
    ledger.enter(Bucket.PRODUCTIVE, 6 * S)
    assert ledger.ettr_over(3600, 9 * S) == pytest.approx(0.75)


@pytest.mark.parametrize("bucket", [Bucket.LOST, Bucket.UNKNOWN])
def test_the_buckets_of_trained_time_are_not_activities(bucket: Bucket) -> None:
    ledger = Ledger(0)
    with pytest.raises(ValueError, match=bucket.value):
        ledger.enter(bucket, 1)
    assert ledger.at_ns == 0


def test_training_before_a_script_started_over_is_neither_good_nor_lost() -> None:
    ledger = training(10)
    ledger.begun_again(11 * S)
    assert spent_s(ledger) == {"unknown": 11}
    assert (ledger.pending_ns, ledger.ettr(), ledger.ettr_over(3600, 11 * S)) == (0, None, None)
    ledger.trained(1, 12 * S)
    ledger.finished(13 * S)
    assert spent_s(ledger) == {"productive": 2, "unknown": 11}


def test_a_journal_written_before_unknown_time_existed_is_read() -> None:
    state = training(3).snapshot()
    del state["settled_ns"]["unknown"]
    assert Ledger.restore(state).snapshot() == training(3).snapshot()


def test_a_finished_run_has_nothing_pending() -> None:
    ledger = training(10)
    ledger.enter(Bucket.STOP, 11 * S)
    ledger.finished(12 * S)
    assert spent_s(ledger) == {"productive": 11, "stop": 1}
    assert ledger.ettr() == 11 / 12


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "format"),
        ({"at_ns": "now"}, "at_ns"),
        ({"at_ns": 1}, "add up"),
        ({"activity": "lunch"}, "lunch"),
        ({"activity": "lost"}, "lost"),
        ({"settled_ns": {}}, "incomplete"),
        ({"settled_ns": dict.fromkeys(Bucket, 0.5)}, "expected an integer"),
        ({"pending": [[1, 2]]}, "incomplete"),
        ({"pending": None}, "incomplete"),
        ({"secured_step": "x"}, "secured_step"),
        ({"hour": 3}, "window"),
        ({"day": [[2, 0], [1, 0]]}, "window"),
    ],
)
def test_an_invalid_snapshot_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Ledger.restore({**training(3).snapshot(), **change})


def test_time_without_progress_does_not_raise_the_ratio() -> None:
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    ledger.trained(1, 10 * S)
    ledger.advance(30 * S)
    assert ledger.ettr() == 1.0
    assert ledger.ettr(20 * S) == 10 / 30
    assert ledger.ettr(99 * S) == 10 / 30, "time that was trained must stay counted"


def test_a_stall_does_not_raise_the_ratio_of_the_last_hour() -> None:
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    ledger.trained(1, 10 * S)
    assert ledger.ettr_over(3600, 30 * S) == 1.0
    assert ledger.ettr_over(3600, 30 * S, 20 * S) == pytest.approx(10 / 30)
    for second in range(60, 7261, 60):
        ledger.advance(second * S)
    assert ledger.ettr_over(3600, 7260 * S) == 1.0
    assert ledger.ettr_over(3600, 7260 * S, 7250 * S) == 0.0
    assert ledger.ettr_over(86_400, 7260 * S, 7250 * S) == pytest.approx(10 / 7260)
    ledger.trained(2, 7260 * S)
    assert ledger.ettr_over(3600, 7260 * S, 0) == 1.0, "it was a long step"


def test_training_without_a_supervisor_is_divided_among_all_steps_that_were_done() -> None:
    """A supervisor died with its group, and the next one goes back to step 30 of 100."""
    ledger = Ledger(0, Bucket.PRODUCTIVE)
    ledger.trained(1, S)
    after = Ledger.restore(ledger.snapshot())
    after.caught_up(100, 100 * S)
    after.rolled_back(30, 101 * S)
    spent = after.buckets_ns()
    assert (spent[Bucket.LOST], after.pending_ns) == (71 * S, 30 * S)
    after.caught_up(20, 102 * S)  # no more than is known
    after.secured(30)
    assert after.buckets_ns()[Bucket.PRODUCTIVE] == 30 * S
