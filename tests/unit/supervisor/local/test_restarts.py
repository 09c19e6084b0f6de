from __future__ import annotations

from supervisor.local.restarts import LONGEST_S, ROW_S, WELL_S, YOUNG_S, Restarts


def test_a_part_that_lived_a_while_is_started_again_at_once() -> None:
    restarts = Restarts()
    restarts.died("supervisor", 10.0, 10.0 + YOUNG_S)
    assert restarts.pop_due(10.0 + YOUNG_S) == ("supervisor",)


def test_one_that_died_young_waits_and_holds_up_no_other() -> None:
    restarts = Restarts()
    restarts.died("sidecar m0", 10.0, 10.1)
    restarts.died("sidecar m1", 1.0, 10.2)
    assert restarts.pop_due(10.2) == ("sidecar m1",)
    assert restarts.pop_due(9.99 + YOUNG_S) == ()
    assert restarts.pop_due(10.0 + YOUNG_S) == ("sidecar m0",)
    assert restarts.pop_due(99.0) == ()


def test_a_part_that_fails_each_time_is_tried_less_and_less_often() -> None:
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


def test_one_that_was_killed_from_outside_or_lived_a_while_is_no_failure() -> None:
    restarts = Restarts()
    for _ in range(5):
        assert restarts.died("supervisor", 10.0, 13.0) == 0.0
    restarts.died("supervisor", 20.0, 20.1, failed=True)
    restarts.died("supervisor", 20.0, 20.1, failed=True)
    assert restarts.died("supervisor", 30.0, 30.0 + WELL_S, failed=True) == 0.0
    assert restarts.failures("supervisor") == 0
