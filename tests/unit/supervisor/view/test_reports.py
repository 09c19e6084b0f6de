"""Only the present generation's data is read from the members' reports."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from holdfast.journal_fields import is_recorded
from holdfast.protocol.launcher_messages import Ending, ProcessPhase, RankInspection
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, RankStall
from supervisor.view import reports
from supervisor.view.model import JobState
from tests.unit.supervisor.job_views import launcher, member, progress, rank, report, view

WELL = member("m0", report("m0", launcher(rank(0)), progress=(progress(0, 7),)))
BUG = '  File "train.py", line 7\nValueError: bad\n'


def test_the_groups_progress_is_that_of_its_present_generation() -> None:
    behind = member("m1", report("m1", launcher(generation=0), progress=(progress(1, 900),)))
    assert reports.furthest_step(view(WELL, behind)) == 7
    assert reports.furthest_step(view()) == -1


def test_state_held_by_holdfast_shows_in_snapshots() -> None:
    never = member("m1", report("m1", launcher(), progress=(progress(1, 5, snapshot_step=-1),)))
    assert not reports.has_protected_state(view(never))
    assert reports.has_protected_state(view(WELL))


def test_evidence_is_that_of_the_present_generation() -> None:
    look = RankInspection(1, 5, 3, 0, "T", 0.0, "")
    old = member("m0", report("m0", launcher(), looks=(look,), looked_for=1))
    new = member("m1", report("m1", launcher(), looks=(look,), looked_for=2))
    assert [each.rank for each in reports.all_inspections(view(old, new, generation=2))] == [1]


def test_the_most_expensive_copy_is_that_of_the_present_generation() -> None:
    dear = replace(progress(1, 5), snapshot_s=2.5)
    assert reports.snapshot_duration_s(view()) == 0.0
    assert (
        reports.snapshot_duration_s(view(WELL, member("m1", report("m1", launcher(), progress=(dear,)))))
        == 2.5
    )
    older = member("m1", report("m1", launcher(generation=0), progress=(dear,)))
    assert reports.snapshot_duration_s(view(WELL, older)) == 0.0


def test_a_rank_missing_in_a_report_has_unknown_values() -> None:
    told = report("m0", launcher(rank(0)), progress=(replace(progress(0, 7), pause_left_s=9.0),))
    assert (reports.step_of(told, 0), reports.step_of(told, 1)) == (7, -1)
    assert (reports.pause_left_s(told, 0), reports.pause_left_s(told, 1)) == (9.0, 0.0)
    now = view(WELL, member("m1", report("m1", launcher(rank(1)), progress=(progress(1, 9),))))
    assert [reports.step_of_rank(now, number) for number in (0, 1, 2)] == [7, 9, -1]
    assert reports.step_of_rank(view(), 0) == -1
    assert reports.progress(now, told) == told.progress
    assert reports.progress(replace(now, memory=replace(now.memory, generation=2)), told) == ()
    assert reports.progress(now, report("m0", None, progress=told.progress)) == ()


def test_a_stall_lasts_until_its_rank_has_done_a_later_step() -> None:
    def stalls(at: int, **given: Any) -> int:
        stall = replace(RankStall(0, 1, 7, 3, 0, "forward", 2.0, 0.6), **given)
        return len(
            reports.stalls(view(), report("m0", launcher(), progress=(progress(0, at),), stalls=(stall,)))
        )

    assert (stalls(7), stalls(6), stalls(8), stalls(7, generation=2)) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("ending", "state", "unwinding"),
    [
        (Ending(1, 1, unwinding=True, step=7), "failing", True),
        (Ending(1, 1, unwinding=True, step=6), "failing", False),
        (Ending(1, 1, unwinding=True), "failing", True),
        (Ending(1, 1, unwinding=True, step=0), "failing", False),
        (Ending(1, 1, unwinding=True, step=7), "exited", False),
        (Ending(1, 1, step=7), "failing", False),
        (None, "failing", False),
    ],
)
def test_an_exception_may_end_its_rank_until_another_step_is_done(
    ending: Ending | None, state: ProcessPhase, unwinding: bool
) -> None:
    told = report("m0", launcher(), progress=(progress(0, 7),))
    assert reports.is_unwinding(told, replace(rank(0), ending=ending, state=state)) is unwinding


def test_a_connected_member_without_a_rank_report_has_unknown_ranks() -> None:
    deaf = member("m3", report("m3", None, launcher_silent="it is stopped"))
    there = (WELL, member("m1"), member("m2", report("m2", None)), deaf, member("m4"))
    names = ("m0", "m1", "m2", "m3")
    assert reports.members_without_rank_report(view(*there, placement=names)) == ("m1", "m2")


def test_the_furthest_step_is_reported_by_members_that_exist_or_is_in_the_journal() -> None:
    assert reports.furthest_step(view(WELL, reached=6)) == 7
    assert reports.furthest_step(view(WELL, reached=8)) == 8
    newer = member("m1", report("m1", launcher(generation=3)))
    assert reports.furthest_step(view(WELL, newer, reached=8)) == 7, "the journal is of another generation"
    assert reports.is_furthest_step_reported(view(WELL))
    assert not reports.is_furthest_step_reported(view(replace(WELL, exists=False)))
    assert not reports.is_furthest_step_reported(view(member("m0", report("m0", launcher()))))


def test_a_script_without_join_or_saved_state_keeps_its_own_state() -> None:
    def keeps(joins: bool, **given: object) -> bool:
        told = report("m1", launcher(rank(1), joins=joins), **given)
        return reports.script_keeps_own_state(view(member("m0"), member("m1", told)))

    assert not keeps(True)
    assert keeps(False)
    assert keeps(False, progress=(progress(1, 5, -1),))
    assert not keeps(False, progress=(progress(1, 5, 0),))
    assert not keeps(False, slots=(HeldSnapshot(1, 5, 8),))
    assert not keeps(False, privates=(HeldPrivateState(1, 1, 5, True),))
    own = member("m0", report("m0", launcher(generation=2, joins=False)))
    assert reports.name_step(view(own, generation=2), 12) == "optimizer step 12 since the restart"
    assert reports.name_step(view(WELL, generation=2), 12) == "step 12"


def test_ranks_end_well_if_their_processes_are_gone_and_did_all_their_work() -> None:
    assert reports.has_finished(rank(0, Ending(1, 0)))
    assert not reports.has_finished(rank(0, Ending(1, 1)))
    assert not reports.has_finished(rank(0, state="exited"))
    assert not reports.has_finished(replace(rank(0, Ending(1, 0)), state="failing"))
    assert reports.ranks(view(member("m0", report("m0", launcher(rank(0), rank(1, generation=0)))))) == (
        rank(0),
    )


def test_the_journal_omits_the_fields_that_only_displays_or_clusters_need() -> None:
    assert [each.name for each in fields(JobState) if not is_recorded(each)] == ["bystanders", "completion"]
