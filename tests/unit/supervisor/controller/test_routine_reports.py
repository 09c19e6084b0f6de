"""A job can ignore routine reports until its next round."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import (
    PASSING,
    PASSING_PROGRESS,
    HeldChecksum,
    HeldSnapshot,
    MemberReport,
    MemoryUse,
    RankProgress,
    RankStall,
)
from supervisor.controller.reports.routine_reports import (
    MAX_KNOWN,
    OF_SNAPSHOTS,
    OF_SNAPSHOTS_PROGRESS,
    KnownChecksums,
    is_calm,
    is_routine,
    only_has_newer_snapshots,
)
from supervisor.view.model import LateRank, OpenIncident, PendingException, StallWatch
from tests.unit.supervisor.job_views import launcher, memory, progress, rank, report

BEFORE = report("m0", launcher(rank(0)), progress=(progress(0, 7), progress(1, 7)))
LATE = LateRank(0, 3, "forward", 1)


def test_a_report_of_further_steps_is_routine() -> None:
    after = replace(
        BEFORE,
        sequence=9,
        now_ns=8,
        progress=tuple(replace(each, step=8, loss="0.4", phase="backward") for each in BEFORE.progress),
        room=MemoryUse(free_bytes=4),
        lag_s=0.1,
    )
    assert is_routine(BEFORE, after)


@pytest.mark.parametrize(
    "change",
    [
        {"launcher": None},
        {"launcher": launcher(rank(0, Ending(5, 1)))},
        {"launcher_silent": "it does not answer"},
        {"slots": (HeldSnapshot(1, 4, 8),)},
        {"stalls": (RankStall(0, 1, 7, 2, 3, "forward", 1.0, 1.0),)},
        {"sidecar_pid": 8},
        {"secured_for": 1},
        {"epoch": 2},
        {"progress": BEFORE.progress[:1]},
        {"progress": (progress(0, 7), progress(1, 6))},
        {"progress": (progress(0, 7), replace(progress(1, 8), late=(8,)))},
        {"progress": (progress(0, 7), replace(progress(1, 8), snapshot_step=8))},
        {"progress": (progress(0, 7), progress(2, 7))},
    ],
)
def test_a_report_that_may_need_a_decision_is_not_routine(change: dict[str, Any]) -> None:
    assert not is_routine(BEFORE, replace(BEFORE, **change))


SNAPSHOT, NEXT = HeldSnapshot(1, 4, 8), HeldSnapshot(1, 8, 8)
SEAL = HeldChecksum(1, 4, 8, 5)
HELD = tuple(replace(each, snapshot_step=4) for each in BEFORE.progress)
WITH_SNAPSHOT = replace(BEFORE, slots=(SNAPSHOT,), seals=(SEAL,), progress=HELD)


def at(rank_1: RankProgress) -> tuple[RankProgress, ...]:
    return HELD[0], rank_1


@pytest.mark.parametrize(
    ("change", "can_wait"),
    [
        ({"slots": (NEXT, SNAPSHOT)}, True),
        ({"slots": (NEXT,)}, True),
        ({"seals": (SEAL, HeldChecksum(1, 8, 8, 5))}, True),
        ({"seals": (HeldChecksum(1, 8, 8, 5),)}, True),
        ({"progress": at(replace(HELD[1], step=8, snapshot_step=8))}, True),
        ({"slots": ()}, False),
        ({"slots": (HeldSnapshot(1, 2, 8), SNAPSHOT)}, False),
        ({"slots": (HeldSnapshot(0, 8, 8), SNAPSHOT)}, False),
        ({"slots": (HeldSnapshot(1, 4, 9),)}, False),
        ({"seals": (HeldChecksum(1, 4, 8, 6),)}, False),
        ({"progress": at(replace(HELD[1], step=8, snapshot_step=2))}, False),
        ({"slots": (NEXT, SNAPSHOT), "launcher": None}, False),
        ({"slots": (NEXT, SNAPSHOT), "secured_for": 1}, False),
        ({"slots": (NEXT, SNAPSHOT), "progress": at(replace(HELD[1], step=6))}, False),
        ({"slots": (NEXT, SNAPSHOT), "progress": at(replace(HELD[1], step=8, late=(8,)))}, False),
        ({"slots": (NEXT, SNAPSHOT), "progress": HELD[:1]}, False),
    ],
)
def test_only_newer_snapshots_can_wait(change: dict[str, Any], can_wait: bool) -> None:
    assert not is_routine(WITH_SNAPSHOT, replace(WITH_SNAPSHOT, **change))
    assert only_has_newer_snapshots(WITH_SNAPSHOT, replace(WITH_SNAPSHOT, **change)) is can_wait


@pytest.mark.parametrize(
    "before",
    [
        None,
        replace(WITH_SNAPSHOT, slots=()),
        replace(WITH_SNAPSHOT, progress=at(replace(HELD[1], snapshot_step=-1))),
    ],
)
def test_the_first_snapshot_cannot_wait_because_the_next_supervisor_must_know_of_it(
    before: MemberReport | None,
) -> None:
    """The job records that a state exists when the ranks' progress names it, perhaps later than the slot."""
    assert not only_has_newer_snapshots(before, replace(WITH_SNAPSHOT, slots=(NEXT, SNAPSHOT)))


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (HeldChecksum(1, 8, 8, 5), False),
        (HeldChecksum(1, 8, 8, 6), True),
        (HeldChecksum(1, 8, 9, 6), False),
        (HeldChecksum(2, 8, 8, 6), False),
        (HeldChecksum(1, 4, 8, 6), False),
    ],
)
def test_a_new_checksum_is_compared_with_those_of_the_same_state(other: HeldChecksum, differs: bool) -> None:
    known = KnownChecksums()
    assert not known.differ(WITH_SNAPSHOT, replace(WITH_SNAPSHOT, seals=(SEAL, other)))
    after = replace(WITH_SNAPSHOT, seals=(SEAL, HeldChecksum(1, 8, 8, 5)))
    assert known.differ(WITH_SNAPSHOT, after) is differs


def test_a_job_remembers_few_checksums_however_long_it_trains() -> None:
    known, before = KnownChecksums(), WITH_SNAPSHOT
    for step in range(8, 8000, 4):
        after = replace(before, seals=(HeldChecksum(1, step, 8, 5),))
        assert not known.differ(before, after)
        before = after
    assert len(known._crcs) == MAX_KNOWN
    assert known.differ(before, replace(before, seals=(HeldChecksum(1, 7996, 8, 6),)))


def test_the_first_report_of_a_connection_is_not_routine() -> None:
    assert not is_routine(None, BEFORE)


def test_the_table_of_ignored_fields_names_only_existing_ones() -> None:
    assert {each.name for each in fields(MemberReport)} >= {*PASSING, *OF_SNAPSHOTS}
    assert {each.name for each in fields(RankProgress)} >= {*PASSING_PROGRESS, *OF_SNAPSHOTS_PROGRESS}


@pytest.mark.parametrize(
    ("changes", "calm"),
    [
        ({"settled": True}, True),
        ({"settled": False}, False),
        ({"phase": "forming"}, True),
        ({"phase": "forming", "stop": "graceful"}, False),
        ({"settled": True, "stop": "graceful"}, False),
        ({"settled": True, "incident": OpenIncident(1, 1, 1, 1, 0.0)}, False),
        ({"phase": "securing"}, False),
        ({"phase": "saving"}, False),
        ({"phase": "stopping"}, False),
        ({"phase": "ended"}, False),
    ],
)
def test_a_job_is_calm_while_it_trains_or_waits_for_members(changes: dict[str, Any], calm: bool) -> None:
    assert is_calm(memory(**changes), StallWatch()) is calm


@pytest.mark.parametrize(
    "watch",
    [StallWatch(ranks=(LATE,)), StallWatch(hints=(PendingException(0, 1, 1),)), StallWatch(untold_ns=1)],
)
def test_a_job_that_watches_a_rank_is_not_calm(watch: StallWatch) -> None:
    assert not is_calm(memory(settled=True), watch)
