"""The silence of a part is measured, and it is given up after its limit."""

from __future__ import annotations

import pytest

from holdfast.inspection.liveness import HELD_UP_S, LIMIT_S, HeartbeatSilence, verdict


def heard(*looks: tuple[float, float, float]) -> float:
    """Return the length of the silence after readings of (last sign of life, now, our lateness)."""
    silence, now_s = HeartbeatSilence(), 0.0
    for heard_s, now_s, late_s in looks:
        silence = silence.later(heard_s, now_s, late_s)
    return silence.length_s(now_s)


def test_silence_begins_at_the_last_sign_of_life() -> None:
    assert heard((10.0, 10.1, 0.0), (10.0, 12.0, 0.0)) == pytest.approx(2.0)
    assert heard((10.0, 12.0, 0.0), (12.05, 12.1, 0.0)) == pytest.approx(0.05)


def test_a_part_without_a_connection_is_not_silent() -> None:
    assert heard((10.0, 16.0, 0.0), (0.0, 99.0, 0.0)) == 0.0


def test_a_suspended_machine_is_not_silence() -> None:
    assert heard((10.0, 10.1, 0.0), (10.0, 70.1, 59.8)) == pytest.approx(0.3)


def test_lateness_counts_from_the_last_sign_of_life_even_if_that_is_new() -> None:
    assert heard((10.0, 10.1, 0.0), (10.15, 70.1, 59.8)) == pytest.approx(0.15)
    assert heard((10.0, 10.1, 0.0), (69.0, 70.0, 59.8)) == 0.0
    assert heard((10.0, 70.0, 59.8), (71.0, 77.0, 0.0)) == pytest.approx(6.0), (
        "the pause is forgotten after the next report"
    )


def test_a_starved_watcher_counts_only_the_time_in_which_it_ran() -> None:
    looks = [(10.0, 10.0 + 3 * n, 2.8) for n in range(1, 11)]
    assert heard(*looks) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("state", "doing"), [("T", "stopped"), ("t", "stopped by a debugger"), ("S", "asleep")]
)
def test_a_silent_launcher_that_could_run_is_given_up(state: str, doing: str) -> None:
    assert verdict(LIMIT_S, state) == ""
    assert verdict(LIMIT_S + 0.2, state) == f"its launcher has sent no heartbeat for 5 s and is {doing}"


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_launcher_that_the_machine_delays_has_a_longer_limit(state: str) -> None:
    assert verdict(HELD_UP_S, state) == ""
    assert "for 61 s" in verdict(HELD_UP_S + 1, state)


def test_an_unknown_process_state_is_named_by_its_letter() -> None:
    assert verdict(6.0, "I").endswith("is in state I")
