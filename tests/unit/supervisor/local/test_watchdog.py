from __future__ import annotations

import pytest

from holdfast.inspection.liveness import HELD_UP_S, LIMIT_S
from supervisor.local.restarts import ANSWER_S, CRASHES, GONE_S, NOW_S, Watchdog

ALIVE = Watchdog().born(100.0).heard(101.0)


def test_without_a_supervisor_nobody_is_silent() -> None:
    assert not Watchdog().doubtful(500.0)
    assert Watchdog().stuck(500.0, "X") == ""
    assert ALIVE.died().stuck(500.0, "X") == ""


@pytest.mark.parametrize(("state", "doing"), [("T", "stopped"), ("S", "asleep")])
def test_a_supervisor_that_gives_no_sign_of_life_is_replaced(state: str, doing: str) -> None:
    assert ALIVE.stuck(101.0 + LIMIT_S, state) == ""
    why = ALIVE.stuck(101.2 + LIMIT_S, state)
    assert why == f"the supervisor has sent no heartbeat for 5 s and is {doing}"


@pytest.mark.parametrize("state", ["R", "D"])
def test_one_that_the_machine_holds_up_has_longer(state: str) -> None:
    assert ALIVE.stuck(101.0 + HELD_UP_S, state) == ""
    assert ALIVE.stuck(102.0 + HELD_UP_S, state)


def test_one_that_has_not_spoken_yet_may_import_and_read_but_not_be_stopped() -> None:
    born = Watchdog().born(100.0)
    assert born.stuck(100.0 + HELD_UP_S, "S") == ""
    assert born.stuck(101.0 + HELD_UP_S, "S")
    assert born.stuck(101.0 + LIMIT_S, "T")


def test_the_time_in_which_the_keeper_did_not_run_is_not_silence() -> None:
    assert ALIVE.later(101.25, 0.0).later(160.0, 58.0).stuck(160.0, "T") == ""
    asked = ALIVE.stop_requested("graceful", 102.0).later(160.0, 58.0)
    assert asked.overdue(160.0) == ""


def test_a_supervisor_is_killed_once_and_told_of_when_that_does_not_end_it() -> None:
    killed = ALIVE.killed(110.0)
    assert killed.stuck(500.0, "D") == ""
    assert not killed.unkillable(110.0 + GONE_S)
    assert killed.unkillable(110.1 + GONE_S)
    assert not killed.died().unkillable(500.0)
    assert not killed.died().born(120.0).unkillable(500.0)


def test_a_supervisor_that_lives_has_the_time_that_a_checkpoint_takes() -> None:
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


def test_supervisors_that_speak_and_die_do_not_answer() -> None:
    asked = ALIVE.stop_requested("graceful", 102.0)
    for second in range(CRASHES):
        assert asked.overdue(103.0 + second) == ""
        asked = asked.died().born(103.0 + second).heard(103.0 + second)
    assert asked.overdue(103.0 + CRASHES) == "the supervisor has ended 3 times instead of ending the run"


def test_the_second_ctrl_c_ends_the_run_whatever_the_supervisor_does() -> None:
    asked = ALIVE.stop_requested("graceful", 102.0).stop_requested("now", 103.0).stop_requested("now", 107.0)
    assert asked.heard(107.5).overdue(103.0 + NOW_S) == ""
    assert asked.heard(107.5).overdue(103.1 + NOW_S)
