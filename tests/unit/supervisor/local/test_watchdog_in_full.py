"""What the keeper knows of its supervisors after each event, and the limits of its patience."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.inspection.liveness import HELD_UP_S, LIMIT_S, HeartbeatSilence
from supervisor.local.restarts import LONGEST_S, ROW_S, WELL_S, Restarts, Watchdog

NEVER = HeartbeatSilence()
ALL = Watchdog(
    *(HeartbeatSilence(1.0), True, 2.0, "graceful", HeartbeatSilence(3.0), HeartbeatSilence(4.0), 2),
)


AT_9 = HeartbeatSilence(9.0)


@pytest.mark.parametrize(
    ("before", "event", "expected"),
    [
        (ALL, lambda it: it.born(9.0), Watchdog(AT_9, False, 0.0, "graceful", ALL.asked, ALL.answered, 2)),
        (ALL, lambda it: it.heard(9.0), Watchdog(AT_9, True, 2.0, "graceful", ALL.asked, AT_9, 2)),
        (Watchdog(), lambda it: it.heard(9.0), Watchdog(AT_9, True)),
        (ALL, Watchdog.died, Watchdog(NEVER, True, 0.0, "graceful", ALL.asked, ALL.answered, 3)),
        (Watchdog(AT_9), Watchdog.died, Watchdog()),
        (
            *(ALL, lambda it: it.killed(9.0)),
            Watchdog(ALL.life, True, 9.0, "graceful", ALL.asked, ALL.answered, 2),
        ),
        (ALL, lambda it: it.stop_requested("now", 9.0), Watchdog(ALL.life, True, 2.0, "now", AT_9, AT_9, 0)),
        (ALL, lambda it: it.stop_requested("graceful", 9.0), ALL),
        (
            *(ALL, lambda it: it.later(9.0, 5.5)),
            Watchdog(
                *(HeartbeatSilence(1.0, 5.5), True, 2.0, "graceful"),
                *(HeartbeatSilence(3.0, 5.5), HeartbeatSilence(4.0, 5.0), 2),
            ),
        ),
        (Watchdog(), lambda it: it.later(9.0, 5.5), Watchdog()),
    ],
)
def test_the_state_after_each_event(
    before: Watchdog, event: Callable[[Watchdog], Watchdog], expected: Watchdog
) -> None:
    assert event(before) == expected


def test_the_state_of_a_new_watchdog() -> None:
    assert Watchdog() == Watchdog(NEVER, False, 0.0, "", NEVER, NEVER, 0)


def test_a_supervisor_is_inspected_after_the_limit_of_its_silence_until_it_is_killed() -> None:
    heard = Watchdog().heard(100.0)
    assert [heard.doubtful(100.0 + LIMIT_S + more) for more in (0.0, 0.25)] == [False, True]
    assert not heard.killed(110.0).doubtful(200.0)


@pytest.mark.parametrize(
    ("state", "spoke", "limit_s", "doing"),
    [
        ("S", True, LIMIT_S, "asleep"),
        ("S", False, HELD_UP_S, "asleep"),
        ("t", False, LIMIT_S, "held by a debugger"),
    ],
)
def test_a_supervisor_is_stuck_after_the_limit_for_its_state(
    state: str, spoke: bool, limit_s: float, doing: str
) -> None:
    found = Watchdog().heard(100.0) if spoke else Watchdog().born(100.0)
    assert found.stuck(100.0 + limit_s, state) == ""
    why = f"the supervisor has sent no heartbeat for {limit_s + 1:.0f} s and is "
    said = found.stuck(101.0 + limit_s, state)
    assert said.startswith(why)
    assert doing in said or state == "t"


def test_why_the_keeper_ends_the_run_itself() -> None:
    asked = Watchdog().stop_requested("graceful", 100.0)
    now = asked.stop_requested("now", 100.0)
    assert [now.overdue(100.0 + more) for more in (5.0, 5.5)] == [
        *("", "the supervisor has not ended the run within 5 s"),
    ]
    assert [asked.overdue(100.0 + more) for more in (10.0, 10.5)] == [
        *("", "no supervisor has answered for 10 s"),
    ]
    crashed = asked.died().died()
    assert crashed.overdue(101.0) == ""
    assert crashed.died().overdue(101.0) == "the supervisor has ended 3 times instead of ending the run"


def test_a_killed_supervisor_is_unkillable_after_five_seconds() -> None:
    killed = Watchdog().killed(100.0)
    assert [killed.unkillable(100.0 + more) for more in (5.0, 5.5)] == [False, True]
    assert not Watchdog().unkillable(500.0)


def test_the_pause_before_each_start_of_a_part() -> None:
    restarts = Restarts()
    assert restarts.died("a", 10.0, 10.25) == 0.75
    assert restarts.died("a", 10.0, 12.0) == 0.0
    assert [restarts.died("a", 20.0, 22.0, failed=True) for _ in range(2)] == [0.0, 2.0]
    assert restarts.failures("a") == 2
    assert restarts.died("a", 30.0, 30.0 + WELL_S, failed=True) == 0.0
    assert restarts.failures("a") == 0
    restarts.died("a", 30.0, 30.0 + WELL_S - 0.5, failed=True)
    assert restarts.failures("a") == 1


def test_failures_are_in_a_row_if_they_are_close_and_the_pause_has_a_bound() -> None:
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
