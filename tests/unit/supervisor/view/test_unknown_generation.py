from __future__ import annotations

from holdfast.protocol.launcher_messages import StartTimes
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import KnownHistory, MemberReport
from supervisor.view import unknown_generation
from tests.unit.supervisor.job_views import launcher, member, progress, rank, report, view

NEWER = member("m0", report("m0", launcher(rank(0, generation=3), generation=3)))
OLDER = member("m1", report("m1", launcher(rank(1))))


def test_the_group_is_ahead_when_any_member_that_exists_runs_a_newer_generation() -> None:
    assert unknown_generation.newest(view(NEWER, OLDER)) == 3
    assert unknown_generation.newest(view(NEWER, OLDER, generation=3)) == 0
    gone = member("m0", NEWER.report, exists=False)
    assert unknown_generation.newest(view(gone, OLDER, member("m2"))) == 0
    assert (
        "run generation 3, but the journal ends with generation 1"
        in unknown_generation.fault(view(NEWER)).detail
    )


def test_claimed_positions_are_those_that_members_report_and_the_rest_belong_to_silent_members() -> None:
    second = member("m4", report("m4", launcher(rank(1, generation=3), generation=3)))
    assert unknown_generation.claimed_placement(view(second, NEWER, OLDER), 3) == ("m0", "m4")
    assert unknown_generation.claimed_placement(view(NEWER, OLDER, member("m5")), 3) == ("m0", "m5")
    assert unknown_generation.claimed_placement(view(NEWER, OLDER), 3) == ("m0",)


def test_the_missing_history_is_taken_from_the_newest_order() -> None:
    newest, older = KnownHistory(3, (Lineage(3, 0),), (7,)), KnownHistory(2, (Lineage(1, 0), Lineage(2, 9)))
    members = (member("m0", report("m0", None, told=older)), member("m1", report("m1", None, told=newest)))
    assert unknown_generation.reported_history(view(*members)) == newest
    assert unknown_generation.reported_history(view(*members, generation=3)) is None, (
        "the journal contains the whole history"
    )
    assert unknown_generation.reported_history(view(member("m1", exists=False), members[0])) == older
    assert unknown_generation.reported_history(view()) is None


def test_without_an_order_a_generation_that_did_a_step_began_no_later_than_that_step() -> None:
    def old(number: int, step: int, marks: StartTimes) -> MemberReport:
        running = launcher(rank(number, generation=3, marks=marks), generation=3)
        return report(f"m{number}", running, progress=(progress(number, step),))

    done = StartTimes(1, 1, 1, 1)
    seen = view(member("m0", old(0, 83, done)), member("m1", old(1, 82, done)), lineage=(Lineage(1, 0),))
    found = unknown_generation.reported_history(seen)
    assert found == KnownHistory(3, (Lineage(1, 0), Lineage(3, 83)))
    unbegun = view(member("m0", old(0, 83, StartTimes())), member("m1", old(1, 83, StartTimes())))
    assert unknown_generation.reported_history(unbegun) is None, "the start may be undone"
