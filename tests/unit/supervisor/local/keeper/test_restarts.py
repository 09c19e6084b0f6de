from __future__ import annotations

from supervisor.local.keeper.restarts import LONGEST_S, ROW_S, WELL_S, YOUNG_S, RestartKey, Restarts

SUPERVISOR = RestartKey("supervisor")
NEW_MEMBER = RestartKey("member")
FIRST, SECOND = RestartKey("sidecar", "m0"), RestartKey("sidecar", "m1")


def test_parts_have_names_for_users() -> None:
    names = [each.name for each in (SUPERVISOR, NEW_MEMBER, SECOND)]
    assert names == ["supervisor", "another member", "sidecar m1"]


def test_a_part_that_lived_a_while_is_restarted_at_once() -> None:
    restarts = Restarts()
    restarts.died(SUPERVISOR, 10.0, 10.0 + YOUNG_S)
    assert restarts.pop_due(10.0 + YOUNG_S) == (SUPERVISOR,)


def test_a_part_that_died_early_waits_and_delays_no_other() -> None:
    restarts = Restarts()
    restarts.died(FIRST, 10.0, 10.1)
    restarts.died(SECOND, 1.0, 10.2)
    assert restarts.pop_due(10.2) == (SECOND,)
    assert restarts.pop_due(9.99 + YOUNG_S) == ()
    assert restarts.pop_due(10.0 + YOUNG_S) == (FIRST,)
    assert restarts.pop_due(99.0) == ()


def test_a_part_that_always_fails_is_restarted_less_and_less_often() -> None:
    restarts, now_s, pauses = Restarts(), 10.0, []
    for _ in range(8):
        pauses.append(restarts.died(SUPERVISOR, now_s - 0.5, now_s, failed=True))
        now_s += 40.0
    assert pauses == [0.5, 2.0, 4.0, 8.0, 16.0, LONGEST_S, LONGEST_S, LONGEST_S]
    assert restarts.failures(SUPERVISOR) == 8
    assert restarts.failures(FIRST) == 0


def test_a_part_waits_once_and_old_failures_are_forgotten() -> None:
    restarts = Restarts()
    restarts.died(NEW_MEMBER, 10.0, 10.0, failed=True)
    restarts.died(NEW_MEMBER, 10.5, 10.5, failed=True)
    assert restarts.pop_due(11.5) == ()
    assert restarts.pop_due(12.5) == (NEW_MEMBER,)
    assert restarts.pop_due(99.0) == ()
    restarts.died(NEW_MEMBER, 10.5 + ROW_S, 10.5 + ROW_S, failed=True)
    assert restarts.failures(NEW_MEMBER) == 1
    assert restarts.waits(NEW_MEMBER)
    assert not restarts.waits(SUPERVISOR)


def test_a_part_that_was_killed_from_outside_or_lived_a_while_is_not_a_failure() -> None:
    restarts = Restarts()
    for _ in range(5):
        assert restarts.died(SUPERVISOR, 10.0, 13.0) == 0.0
    restarts.died(SUPERVISOR, 20.0, 20.1, failed=True)
    restarts.died(SUPERVISOR, 20.0, 20.1, failed=True)
    assert restarts.died(SUPERVISOR, 30.0, 30.0 + WELL_S, failed=True) == 0.0
    assert restarts.failures(SUPERVISOR) == 0


def test_the_pause_before_a_start_grows_with_consecutive_failures() -> None:
    restarts = Restarts()
    assert restarts.died(FIRST, 10.0, 10.25) == 0.75
    assert restarts.died(FIRST, 10.0, 12.0) == 0.0
    assert [restarts.died(FIRST, 20.0, 22.0, failed=True) for _ in range(2)] == [0.0, 2.0]
    assert restarts.failures(FIRST) == 2
    assert restarts.died(FIRST, 30.0, 30.0 + WELL_S, failed=True) == 0.0
    assert restarts.failures(FIRST) == 0
    restarts.died(FIRST, 30.0, 30.0 + WELL_S - 0.5, failed=True)
    assert restarts.failures(FIRST) == 1


def test_failures_are_consecutive_if_they_are_close_together_and_the_pause_is_bounded() -> None:
    restarts, now_s = Restarts(), 10.0
    for count in range(1, 14):
        pause_s = restarts.died(FIRST, now_s, now_s, failed=True)
        assert pause_s == (1.0 if count == 1 else min(LONGEST_S, 2.0 ** (count - 1)))
        assert restarts.failures(FIRST) == count
        now_s += ROW_S - 0.5
    now_s += 0.5
    assert restarts.died(FIRST, now_s, now_s, failed=True) == 1.0
    assert restarts.failures(FIRST) == 1


def test_parts_are_started_in_the_order_in_which_they_died() -> None:
    restarts = Restarts()
    restarts.died(FIRST, 1.0, 10.0)
    restarts.died(SECOND, 1.0, 11.0)
    restarts.died(FIRST, 1.0, 12.0)
    assert restarts.pop_due(9.0) == ()
    assert restarts.pop_due(11.0) == (SECOND,)
    assert (restarts.waits(FIRST), restarts.waits(SECOND)) == (True, False)
    assert restarts.pop_due(12.0) == (FIRST,)
    assert restarts.pop_due(99.0) == ()
