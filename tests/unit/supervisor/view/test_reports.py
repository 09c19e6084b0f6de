"""What is read out of the members' reports is that of the present generation."""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import hung_rank
from supervisor.view import reports
from tests.unit.supervisor.job_views import launcher, member, progress, rank, report, view

WELL = member("m0", report("m0", launcher(rank(0)), progress=(progress(0, 7),)))
BUG = '  File "train.py", line 7\nValueError: bad\n'


def test_how_far_the_group_got_is_what_its_present_generation_says() -> None:
    behind = member("m1", report("m1", launcher(generation=0), progress=(progress(1, 900),)))
    assert reports.furthest_step(view(WELL, behind)) == 7
    assert reports.furthest_step(view()) == -1


def test_state_in_our_care_shows_in_snapshots() -> None:
    never = member("m1", report("m1", launcher(), progress=(progress(1, 5, snapshot_step=-1),)))
    assert not reports.has_protected_state(view(never))
    assert reports.has_protected_state(view(WELL))


def test_evidence_is_that_of_the_present_generation() -> None:
    look = RankInspection(1, 5, 3, 0, "T", 0.0, "")
    old = member("m0", report("m0", launcher(), looks=(look,), looked_for=1))
    new = member("m1", report("m1", launcher(), looks=(look,), looked_for=2))
    assert [each.rank for each in hung_rank.inspections(view(old, new, generation=2))] == [1]


def test_the_dearest_copy_is_that_of_the_present_generation() -> None:
    dear = replace(progress(1, 5), snapshot_s=2.5)
    assert reports.snapshot_duration_s(view()) == 0.0
    assert (
        reports.snapshot_duration_s(view(WELL, member("m1", report("m1", launcher(), progress=(dear,)))))
        == 2.5
    )
    older = member("m1", report("m1", launcher(generation=0), progress=(dear,)))
    assert reports.snapshot_duration_s(view(WELL, older)) == 0.0
