from __future__ import annotations

from supervisor.restarts import YOUNG_S, Restarts


def test_a_part_that_lived_a_while_is_started_again_at_once() -> None:
    restarts = Restarts()
    restarts.died("supervisor", 10.0, 10.0 + YOUNG_S)
    assert restarts.take(10.0 + YOUNG_S) == ("supervisor",)


def test_one_that_died_young_waits_and_holds_up_no_other() -> None:
    restarts = Restarts()
    restarts.died("sidecar m0", 10.0, 10.1)
    restarts.died("sidecar m1", 1.0, 10.2)
    assert restarts.take(10.2) == ("sidecar m1",)
    assert restarts.take(9.99 + YOUNG_S) == ()
    assert restarts.take(10.0 + YOUNG_S) == ("sidecar m0",)
    assert restarts.take(99.0) == ()
