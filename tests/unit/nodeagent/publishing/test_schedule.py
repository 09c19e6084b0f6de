from __future__ import annotations

from nodeagent.publishing.schedule import (
    HEARTBEAT_S,
    MAX_RETRY_S,
    REFILL_S,
    RETRY_S,
    SOON_S,
    TOKENS,
    WriteSchedule,
)

CHANGE_S = 1.0  # a change of the verdict is to be written within this time


def test_the_first_write_is_due_at_once() -> None:
    assert WriteSchedule().due_s("healthy") < 0


def test_without_a_change_it_writes_every_heartbeat() -> None:
    schedule = WriteSchedule().succeeded("healthy", 100.0)
    assert schedule.due_s("healthy") == 100.0 + HEARTBEAT_S
    schedule = schedule.succeeded("healthy", 130.0)
    assert schedule.due_s("healthy") == 130.0 + HEARTBEAT_S


def test_a_change_is_due_soon() -> None:
    schedule = WriteSchedule().succeeded("healthy", 100.0)
    assert schedule.due_s("bad") == 100.0 + SOON_S < 100.0 + CHANGE_S


def simulate(schedule: WriteSchedule, verdicts_per_s: float, until_s: float) -> list[float]:
    """Return the times of the writes of a node whose verdict changes at this rate."""
    now_s, written = 0.0, []
    while now_s < until_s:
        verdict = int(now_s * verdicts_per_s)
        if schedule.due_s(verdict) <= now_s:
            schedule = schedule.succeeded(verdict, now_s)
            written.append(now_s)
        now_s += 0.05
    return written


def test_some_changes_in_a_row_are_written_at_once_and_a_flapping_node_at_a_bounded_rate() -> None:
    written = simulate(WriteSchedule(), 2.0, 600.0)
    assert written[4] < 3.0
    assert len(written) <= TOKENS + 600.0 / REFILL_S + 1
    last = [later - earlier for earlier, later in zip(written[-20:], written[-19:], strict=False)]
    assert min(last) > REFILL_S / 2
    assert max(last) < 2 * REFILL_S


def test_a_quiet_node_has_its_tokens_again() -> None:
    schedule = WriteSchedule()
    for number in range(30):
        schedule = schedule.succeeded(number, number * 0.2)
    assert schedule.due_s("another") > schedule.tried_s + 1.0
    rested = schedule.succeeded(29, schedule.tried_s + 10 * HEARTBEAT_S)
    assert rested.due_s("another") == rested.tried_s + SOON_S


def test_failures_wait_longer_up_to_a_limit_and_a_change_does_not_hurry_them() -> None:
    schedule = WriteSchedule().succeeded("healthy", 0.0)
    waits = []
    for _ in range(40):
        schedule = schedule.failed(100.0)
        assert schedule.due_s("healthy") == schedule.due_s("bad")
        waits.append(schedule.due_s("healthy") - 100.0)
    assert waits[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert waits == sorted(waits)
    assert waits[-1] == MAX_RETRY_S
    assert schedule.succeeded("bad", 200.0).due_s("bad") == 200.0 + HEARTBEAT_S


def test_the_server_may_ask_for_a_longer_wait_but_not_for_more_than_a_heartbeat() -> None:
    assert WriteSchedule().failed(0.0, 17.0).due_s("x") == 17.0
    assert WriteSchedule().failed(0.0, 9999.0).due_s("x") == HEARTBEAT_S
