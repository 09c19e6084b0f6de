from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.agent import clean_time
from nodeagent.agent.clean_time import GAP_S, CleanTime
from nodeagent.model import Action, HealthFinding, Level

LEVELS = (Level.DEGRADED, Level.UNHEALTHY)


def standing(level: Level) -> list[HealthFinding]:
    if level is Level.HEALTHY:
        return []
    return [HealthFinding("node", "x", None, level, Action.NONE, 0.0, 0.0, "it", (), "", ("test",))]


def ages(found: CleanTime, now_s: float) -> tuple[float | None, ...]:
    return tuple(found.as_json(now_s).values())


def test_clean_time_counts_from_the_first_cycle_in_which_all_sensors_were_tried() -> None:
    found = CleanTime().after(10.0, [], ready=False)
    assert ages(found, 10.0) == (0.0, 0.0, None)
    found = found.after(20.0, [], ready=True).after(50.0, [], ready=True)
    assert ages(found, 50.0) == (30.0, 30.0, None)


def test_clean_time_restarts_at_the_end_of_a_finding() -> None:
    found = CleanTime().after(0.0, [], ready=True)
    found = found.after(10.0, standing(Level.DEGRADED), ready=True)
    assert ages(found, 15.0) == (15.0, 5.0, None)
    found = found.after(20.0, standing(Level.UNHEALTHY), ready=True)
    assert ages(found, 25.0) == (5.0, 5.0, 5.0)


def test_clean_time_continues_over_a_short_restart_and_restarts_after_a_gap() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY), ready=True).after(100.0, [], ready=True)
    assert ages(found.resumed(100.0, 100.0 + GAP_S), 300.0) == (300.0, 300.0, 300.0)
    away = found.resumed(100.0, 101.0 + GAP_S)
    assert ages(away, 300.0) == (0.0, 0.0, 300.0)
    assert ages(away.after(400.0, [], ready=True), 410.0) == (10.0, 10.0, 410.0)


@given(
    st.lists(st.tuples(st.floats(0.0, 500.0), st.sampled_from(Level), st.booleans()), max_size=20),
    st.floats(0.0, 9.0),
)
def test_clean_time_never_exceeds_the_watched_time_nor_the_time_since_the_last_fault(
    looks: list[tuple[float, Level, bool]], later_s: float
) -> None:
    found, now_s, began_s, bad_s = CleanTime(), 0.0, None, float("-inf")
    for step_s, level, ready in looks:
        now_s += step_s
        found = clean_time.load_clean_time(
            json.loads(json.dumps(found.after(now_s, standing(level), ready).dump()))
        )
        began_s = now_s if began_s is None and ready else began_s
        bad_s = now_s if level is Level.UNHEALTHY else bad_s
    at_s = now_s + later_s
    clean_s, quiet_s, _ = ages(found, at_s)
    assert clean_s is not None
    assert quiet_s is not None
    assert quiet_s <= clean_s <= (0.0 if began_s is None else at_s - max(began_s, bad_s)) + 0.001


def test_a_release_of_the_gpus_neither_restarts_the_clean_time_nor_counts() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY), ready=True).after(100.0, [], ready=True)
    for now_s in (103.0, 500.0, 700.0):
        found = found.after(now_s, [], ready=True, released=True)
        assert ages(found, now_s) == (100.0, 100.0, now_s)
    found = found.after(710.0, [], ready=True)
    assert ages(found, 710.0) == (110.0, 110.0, 710.0)
    found = found.after(720.0, standing(Level.UNHEALTHY), ready=True).after(730.0, [], ready=True)
    assert ages(found, 730.0) == (10.0, 10.0, 10.0), "what was released before is over"


def test_a_restart_during_a_release_does_not_restart_the_clean_time() -> None:
    found = CleanTime().after(0.0, [], ready=True).after(50.0, [], ready=True)
    long = 50.0 + 10 * GAP_S
    assert ages(found.resumed(50.0, long, released_until_s=long + 1), long) == (50.0, 50.0, None)
    assert ages(found.resumed(50.0, long, released_until_s=long - GAP_S), long) == (50.0, 50.0, None)
    assert ages(found.resumed(50.0, long, released_until_s=long - GAP_S - 1), long)[0] == 0.0
    assert ages(found.resumed(50.0, long), long)[0] == 0.0


def test_a_release_is_saved_and_what_an_earlier_version_saved_is_loaded() -> None:
    found = CleanTime().after(0.0, [], ready=True).after(10.0, [], ready=True, released=True)
    again = clean_time.load_clean_time(
        json.loads(json.dumps(found.dump())), json.loads(json.dumps(found.released_s))
    )
    assert ages(again, 30.0) == (20.0, 20.0, None)
    assert len(found.dump()) == 3, "an earlier version reads three values"
