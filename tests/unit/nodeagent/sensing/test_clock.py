from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.clock import boot_id
from nodeagent.sensing import clock
from nodeagent.sensing.clock import Anchor

TIMES = st.floats(0, 4e9)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6), TIMES), min_size=1, max_size=20))
def test_agent_time_never_decreases_over_restarts_reboots_and_clock_changes(
    lives: list[tuple[bool, float, float]],
) -> None:
    at, last_s, boot, up_s = None, 0.0, 0, 0.0
    for reboots, runs_s, wall_s in lives:
        boot, up_s = (boot + 1, 0.0) if reboots else (boot, up_s)
        at = clock.anchor(at, last_s, f"boot {boot}", up_s, wall_s)
        assert up_s + at.offset_s >= last_s
        up_s += runs_s
        last_s = max(last_s, up_s + at.offset_s)


def test_a_restart_in_the_same_boot_keeps_the_time_whatever_the_wall_clock_shows() -> None:
    before = Anchor("a", 1000.0)
    assert clock.anchor(before, 5000.0, "a", 4000.0, 7.0) is before


def test_a_first_start_uses_the_wall_clock() -> None:
    made = clock.begin(None, 0.0)
    assert abs(made.now_s() - time.time()) < 1.0
    assert abs(made.from_monotonic(time.monotonic()) - made.now_s()) < 1.0
    assert made.anchor.boot_id == boot_id()
