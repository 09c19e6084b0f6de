from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.protocol.launcher_messages import StartTimes
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import Phase
from sidecar.watch.start_monitor import LATE_S, StartMonitor
from tests.unit.supervisor.job_views import S, launcher, rank

RELEASED = launcher(rank(0, state="starting"))


def test_a_released_process_that_never_starts_is_late_and_then_over_its_limit() -> None:
    starts = StartMonitor(10.0)
    assert starts.poll(RELEASED, 100 * S, 0.0) == ()
    assert starts.poll(RELEASED, int((100 + LATE_S) * S), 0.0) == ()
    [late] = starts.poll(RELEASED, 105 * S, 0.0)
    assert (late.rank, late.phase_name, late.stalled_s, late.limited) == (0, "starting", 5.0, False)
    [over] = starts.poll(RELEASED, 111 * S, 0.0)
    assert (over.limited, over.limit_s) == (True, 10.0)


def test_each_process_is_timed_separately_and_lateness_of_the_sidecar_does_not_count() -> None:
    starts = StartMonitor(10.0)
    starts.poll(RELEASED, 100 * S, 0.0)
    another = launcher(rank(0, state="starting", pid=7))
    assert starts.poll(another, 105 * S, 0.0) == ()
    assert starts.poll(another, 205 * S, 99.0) == ()


def test_a_process_that_has_started_or_does_not_exist_or_still_imports_is_not_timed() -> None:
    for state in (
        launcher(rank(0, state="running", marks=StartTimes(1))),
        launcher(rank(0, state="starting", pid=0)),
        replace(RELEASED, strategy="cold"),
    ):
        starts = StartMonitor(10.0)
        starts.poll(state, 100 * S, 0.0)
        assert starts.poll(state, 200 * S, 0.0) == ()


def late(rank_number: int, generation: int, waited_s: float, limit_s: float, limited: bool) -> RankStall:
    return RankStall(
        rank=rank_number,
        generation=generation,
        step=-1,
        phase=int(Phase.JOINING),
        phase_seq=0,
        phase_name="starting",
        stalled_s=waited_s,
        limit_s=limit_s,
        limited=limited,
        begun=True,
    )


def test_late_processes_are_reported_by_generation_and_rank_with_the_limit_that_they_exceed() -> None:
    starts = StartMonitor(10.0)
    first = rank(1, state="starting", generation=2, pid=7)
    starts.poll(launcher(first), 100 * S, 0.0)
    more = launcher(first, rank(0, state="starting", generation=2, pid=8))
    starts.poll(more, 106 * S, 0.0)
    assert starts.poll(more, 110 * S + 1_234_567, 0.0) == (
        late(0, 2, 4.001, LATE_S, False),
        late(1, 2, 10.001, 10.0, True),
    )
    assert starts.poll(launcher(), 111 * S, 0.0) == ()
    assert starts.poll(more, 112 * S, 0.0) == (), "the ranks were released again"


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        (3.0, ()),
        (3.5, (late(0, 1, 3.5, 3.0, False),)),
        (10.0, (late(0, 1, 10.0, 3.0, False),)),
        (10.5, (late(0, 1, 10.5, 10.0, True),)),
    ],
)
def test_a_process_is_late_after_three_seconds_and_over_its_limit_after_that_of_a_first_step(
    waited_s: float, expected: tuple[RankStall, ...]
) -> None:
    assert LATE_S == 3.0
    starts = StartMonitor(10.0)
    starts.poll(RELEASED, 100 * S, 0.0)
    assert starts.poll(RELEASED, 100 * S + round(waited_s * S), 0.0) == expected


def test_the_sidecars_own_lateness_is_subtracted_to_the_nanosecond_at_each_poll() -> None:
    starts = StartMonitor(10.0)
    starts.poll(RELEASED, 100 * S, 0.5)  # counts from 100 s, because the sidecar did not wait for it before
    assert starts.poll(RELEASED, 102 * S, 1.0) == ()
    assert starts.poll(RELEASED, 105 * S, 1.0) == ()
    assert starts.poll(RELEASED, 105 * S + 1, 0.0) == (late(0, 1, 3.0, 3.0, False),)
    assert starts.poll(RELEASED, 106 * S, 0.25) == (late(0, 1, 3.75, 3.0, False),)
