from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import StartTimes
from sidecar.watch.start_monitor import LATE_S, StartMonitor
from tests.unit.supervisor.job_views import S, launcher, rank

RELEASED = launcher(rank(0, state="starting"))


def test_a_process_that_was_released_and_never_begins_is_late_and_then_over_its_limit() -> None:
    starts = StartMonitor(10.0)
    assert starts.poll(RELEASED, 100 * S, 0.0) == ()
    assert starts.poll(RELEASED, int((100 + LATE_S) * S), 0.0) == ()
    [late] = starts.poll(RELEASED, 105 * S, 0.0)
    assert (late.rank, late.phase_name, late.stalled_s, late.limited) == (0, "starting", 5.0, False)
    [over] = starts.poll(RELEASED, 111 * S, 0.0)
    assert (over.limited, over.limit_s) == (True, 10.0)


def test_each_process_is_timed_by_itself_and_our_own_lateness_is_no_fault_of_it() -> None:
    starts = StartMonitor(10.0)
    starts.poll(RELEASED, 100 * S, 0.0)
    another = launcher(rank(0, state="starting", pid=7))
    assert starts.poll(another, 105 * S, 0.0) == ()
    assert starts.poll(another, 205 * S, 99.0) == ()


def test_who_has_begun_or_has_no_process_or_has_yet_to_import_is_not_timed() -> None:
    for state in (
        launcher(rank(0, state="running", marks=StartTimes(1))),
        launcher(rank(0, state="starting", pid=0)),
        replace(RELEASED, strategy="cold"),
    ):
        starts = StartMonitor(10.0)
        starts.poll(state, 100 * S, 0.0)
        assert starts.poll(state, 200 * S, 0.0) == ()
