from __future__ import annotations

from supervisor.local.restarts import LONGEST_S, ROW_S, WELL_S, YOUNG_S, Restarts


def test_a_part_that_lived_a_while_is_restarted_at_once() -> None:
    restarts = Restarts()
    restarts.died("supervisor", 10.0, 10.0 + YOUNG_S)
    assert restarts.pop_due(10.0 + YOUNG_S) == ("supervisor",)


def test_a_part_that_died_early_waits_and_delays_no_other() -> None:
    restarts = Restarts()
    restarts.died("sidecar m0", 10.0, 10.1)
    restarts.died("sidecar m1", 1.0, 10.2)
    assert restarts.pop_due(10.2) == ("sidecar m1",)
    assert restarts.pop_due(9.99 + YOUNG_S) == ()
    assert restarts.pop_due(10.0 + YOUNG_S) == ("sidecar m0",)
    assert restarts.pop_due(99.0) == ()


def test_a_part_that_always_fails_is_restarted_less_and_less_often() -> None:
    restarts, now_s, pauses = Restarts(), 10.0, []
    for _ in range(8):
        pauses.append(restarts.died("supervisor", now_s - 0.5, now_s, failed=True))
        now_s += 40.0
    assert pauses == [0.5, 2.0, 4.0, 8.0, 16.0, LONGEST_S, LONGEST_S, LONGEST_S]
    assert restarts.failures("supervisor") == 8
    assert restarts.failures("sidecar m0") == 0


def test_a_part_waits_once_and_old_failures_are_forgotten() -> None:
    restarts = Restarts()
    restarts.died("another member", 10.0, 10.0, failed=True)
    restarts.died("another member", 10.5, 10.5, failed=True)
    assert restarts.pop_due(11.5) == ()
    assert restarts.pop_due(12.5) == ("another member",)
    assert restarts.pop_due(99.0) == ()
    restarts.died("another member", 10.5 + ROW_S, 10.5 + ROW_S, failed=True)
    assert restarts.failures("another member") == 1
    assert restarts.waits("another member")
    assert not restarts.waits("supervisor")


def test_a_part_that_was_killed_from_outside_or_lived_a_while_is_not_a_failure() -> None:
    restarts = Restarts()
    for _ in range(5):
        assert restarts.died("supervisor", 10.0, 13.0) == 0.0
    restarts.died("supervisor", 20.0, 20.1, failed=True)
    restarts.died("supervisor", 20.0, 20.1, failed=True)
    assert restarts.died("supervisor", 30.0, 30.0 + WELL_S, failed=True) == 0.0
    assert restarts.failures("supervisor") == 0


def test_the_pause_before_a_start_grows_with_consecutive_failures() -> None:
    restarts = Restarts()
    assert restarts.died("a", 10.0, 10.25) == 0.75
    assert restarts.died("a", 10.0, 12.0) == 0.0
    assert [restarts.died("a", 20.0, 22.0, failed=True) for _ in range(2)] == [0.0, 2.0]
    assert restarts.failures("a") == 2
    assert restarts.died("a", 30.0, 30.0 + WELL_S, failed=True) == 0.0
    assert restarts.failures("a") == 0
    restarts.died("a", 30.0, 30.0 + WELL_S - 0.5, failed=True)
    assert restarts.failures("a") == 1


def test_failures_are_consecutive_if_they_are_close_together_and_the_pause_is_bounded() -> None:
    restarts, now_s = Restarts(), 10.0
    for count in range(1, 14):
        pause_s = restarts.died("a", now_s, now_s, failed=True)
        assert pause_s == (1.0 if count == 1 else min(LONGEST_S, 2.0 ** (count - 1)))
        assert restarts.failures("a") == count
        now_s += ROW_S - 0.5
    now_s += 0.5
    assert restarts.died("a", now_s, now_s, failed=True) == 1.0
    assert restarts.failures("a") == 1


def test_parts_are_started_in_the_order_in_which_they_died() -> None:
    restarts = Restarts()
    restarts.died("a", 1.0, 10.0)
    restarts.died("b", 1.0, 11.0)
    restarts.died("a", 1.0, 12.0)
    assert restarts.pop_due(9.0) == ()
    assert restarts.pop_due(11.0) == ("b",)
    assert (restarts.waits("a"), restarts.waits("b")) == (True, False)
    assert restarts.pop_due(12.0) == ("a",)
    assert restarts.pop_due(99.0) == ()
