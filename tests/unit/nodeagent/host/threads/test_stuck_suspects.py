from __future__ import annotations

from nodeagent.host.stuck_threads import (
    STUCK_S,
    SleepingThread,
    Suspect,
    ThreadKey,
    asleep_for,
    describe,
    process_count,
    suspects,
)

KEY = (10, 11)


def seen(switches: int = 5, start: int = 100, wait_channel: str = "") -> dict[ThreadKey, SleepingThread]:
    return {KEY: SleepingThread("python", start, switches, wait_channel)}


def stuck_after(*looks: dict[ThreadKey, SleepingThread], every_s: float = 30.0) -> bool:
    found: dict[ThreadKey, Suspect] = {}
    for n, look in enumerate(looks):
        found = suspects(found, look, n * every_s)
    return bool(asleep_for(found, (len(looks) - 1) * every_s, STUCK_S))


def test_a_thread_that_stays_asleep_for_a_minute_is_stuck() -> None:
    assert stuck_after(seen(), seen(), seen())
    assert not stuck_after(seen(), seen())


def test_a_thread_that_sleeps_at_each_look_but_runs_in_between_is_not_stuck() -> None:
    assert not stuck_after(seen(5), seen(6), seen(7))


def test_a_later_thread_with_the_same_id_is_a_different_one() -> None:
    assert not stuck_after(seen(), seen(), seen(start=900))


def test_a_thread_that_was_awake_in_between_starts_over() -> None:
    assert not stuck_after(seen(), {}, seen())


def test_a_thread_that_was_frozen_on_purpose_is_not_stuck() -> None:
    frozen = seen(wait_channel="__refrigerator")
    assert not stuck_after(frozen, frozen, frozen)


def test_threads_of_one_process_count_once_and_the_longest_stuck_are_named_first() -> None:
    found = {
        (10, 10 + n): Suspect(SleepingThread(f"t{n}", 1, 1, "rpc_wait" if n == 4 else ""), 100.0 - n)
        for n in range(5)
    }
    assert process_count(found) == 1
    assert (
        describe(found, 160.0)
        == "t4 (14) for 64 s in rpc_wait, t3 (13) for 63 s, t2 (12) for 62 s, and 2 more"
    )
