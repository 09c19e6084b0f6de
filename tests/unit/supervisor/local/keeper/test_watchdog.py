from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.inspection.liveness import HELD_UP_S, LIMIT_S, HeartbeatSilence
from supervisor.local.keeper.watchdog import ANSWER_S, CRASHES, GONE_S, NOW_S, Watchdog

ALIVE = Watchdog().born(100.0).heard(101.0)


def test_without_a_supervisor_there_is_no_silence() -> None:
    assert not Watchdog().doubtful(500.0)
    assert Watchdog().stuck(500.0, "X") == ""
    assert ALIVE.died().stuck(500.0, "X") == ""


@pytest.mark.parametrize(("state", "doing"), [("T", "stopped"), ("S", "asleep")])
def test_a_supervisor_without_signs_of_life_is_replaced(state: str, doing: str) -> None:
    assert ALIVE.stuck(101.0 + LIMIT_S, state) == ""
    why = ALIVE.stuck(101.2 + LIMIT_S, state)
    assert why == f"the supervisor has sent no heartbeat for 5 s and is {doing}"


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_supervisor_that_the_machine_delays_has_a_longer_limit(state: str) -> None:
    assert ALIVE.stuck(101.0 + HELD_UP_S, state) == ""
    assert ALIVE.stuck(102.0 + HELD_UP_S, state)


def test_a_supervisor_that_has_not_reported_yet_may_be_importing_but_not_stopped() -> None:
    born = Watchdog().born(100.0)
    assert born.stuck(100.0 + HELD_UP_S, "S") == ""
    assert born.stuck(101.0 + HELD_UP_S, "S")
    assert born.stuck(101.0 + LIMIT_S, "T")


def test_the_time_in_which_the_keeper_did_not_run_is_not_silence() -> None:
    assert ALIVE.later(101.25, 0.0).later(160.0, 58.0).stuck(160.0, "T") == ""
    asked = ALIVE.stop_requested("graceful", 102.0).later(160.0, 58.0)
    assert asked.overdue(160.0) == ""


def test_a_supervisor_is_killed_once_and_reported_if_that_does_not_end_it() -> None:
    killed = ALIVE.killed(110.0)
    assert killed.stuck(500.0, "D") == ""
    assert not killed.unkillable(110.0 + GONE_S)
    assert killed.unkillable(110.1 + GONE_S)
    assert not killed.died().unkillable(500.0)
    assert not killed.died().born(120.0).unkillable(500.0)


def test_a_live_supervisor_has_the_time_that_a_checkpoint_takes() -> None:
    asked = ALIVE.stop_requested("graceful", 102.0)
    for second in range(103, 400):
        asked = asked.heard(float(second))
        assert asked.overdue(second + 0.5) == ""


def test_a_run_is_ended_when_no_supervisor_answers_after_ctrl_c() -> None:
    for asked in (ALIVE.stop_requested("graceful", 102.0), Watchdog().stop_requested("graceful", 102.0)):
        assert asked.overdue(102.0 + ANSWER_S) == ""
        assert asked.overdue(102.1 + ANSWER_S) == "no supervisor has answered for 10 s"


def test_without_ctrl_c_nothing_is_overdue() -> None:
    assert Watchdog().overdue(1e6) == ""
    assert ALIVE.overdue(1e6) == ""


def test_supervisors_that_report_and_die_do_not_count_as_answering() -> None:
    asked = ALIVE.stop_requested("graceful", 102.0)
    for second in range(CRASHES):
        assert asked.overdue(103.0 + second) == ""
        asked = asked.died().born(103.0 + second).heard(103.0 + second)
    assert asked.overdue(103.0 + CRASHES) == "the supervisor has died 3 times instead of ending the run"


def test_the_second_ctrl_c_ends_the_run_whatever_the_supervisor_does() -> None:
    asked = ALIVE.stop_requested("graceful", 102.0).stop_requested("now", 103.0).stop_requested("now", 107.0)
    assert asked.heard(107.5).overdue(103.0 + NOW_S) == ""
    assert asked.heard(107.5).overdue(103.1 + NOW_S)


# -- in full

NEVER = HeartbeatSilence()
ALL = Watchdog(
    *(HeartbeatSilence(1.0), True, 2.0, "graceful", HeartbeatSilence(3.0), HeartbeatSilence(4.0), 2),
)


AT_9 = HeartbeatSilence(9.0)


@pytest.mark.parametrize(
    ("before", "event", "expected"),
    [
        (
            ALL,
            lambda it: it.born(9.0),
            Watchdog(AT_9, False, 0.0, "graceful", ALL.since_stop, ALL.unanswered, 2),
        ),
        (ALL, lambda it: it.heard(9.0), Watchdog(AT_9, True, 2.0, "graceful", ALL.since_stop, AT_9, 2)),
        (Watchdog(), lambda it: it.heard(9.0), Watchdog(AT_9, True)),
        (ALL, Watchdog.died, Watchdog(NEVER, True, 0.0, "graceful", ALL.since_stop, ALL.unanswered, 3)),
        (Watchdog(AT_9), Watchdog.died, Watchdog()),
        (
            *(ALL, lambda it: it.killed(9.0)),
            Watchdog(ALL.silence, True, 9.0, "graceful", ALL.since_stop, ALL.unanswered, 2),
        ),
        (
            ALL,
            lambda it: it.stop_requested("now", 9.0),
            Watchdog(ALL.silence, True, 2.0, "now", AT_9, AT_9, 0),
        ),
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
def test_each_event_leads_to_the_expected_state(
    before: Watchdog, event: Callable[[Watchdog], Watchdog], expected: Watchdog
) -> None:
    assert event(before) == expected


def test_a_new_watchdog_has_recorded_no_event() -> None:
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


def test_the_keeper_ends_the_run_itself_once_the_supervisor_exceeds_a_limit() -> None:
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
    assert crashed.died().overdue(101.0) == "the supervisor has died 3 times instead of ending the run"


def test_a_killed_supervisor_is_unkillable_after_five_seconds() -> None:
    killed = Watchdog().killed(100.0)
    assert [killed.unkillable(100.0 + more) for more in (5.0, 5.5)] == [False, True]
    assert not Watchdog().unkillable(500.0)
