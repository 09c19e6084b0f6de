from __future__ import annotations

from supervisor import lost_track
from tests.unit.supervisor.views import launcher, member, rank, report, view

NEWER = member("m0", report("m0", launcher(rank(0, generation=3), generation=3)))
OLDER = member("m1", report("m1", launcher(rank(1))))


def test_the_group_is_ahead_when_any_member_that_exists_runs_a_newer_generation() -> None:
    assert lost_track.ahead(view(NEWER, OLDER)) == 3
    assert lost_track.ahead(view(NEWER, OLDER, generation=3)) == 0
    gone = member("m0", NEWER.report, exists=False)
    assert lost_track.ahead(view(gone, OLDER, member("m2"))) == 0
    assert "run generation 3, and the journal knows only 1" in lost_track.fault(view(NEWER)).detail


def test_seats_are_those_that_the_members_claim_and_the_rest_is_whose_word_is_not_there_yet() -> None:
    second = member("m4", report("m4", launcher(rank(1, generation=3), generation=3)))
    assert lost_track.seats(view(second, NEWER, OLDER), 3) == ("m0", "m4")
    assert lost_track.seats(view(NEWER, OLDER, member("m5")), 3) == ("m0", "m5")
    assert lost_track.seats(view(NEWER, OLDER), 3) == ("m0",)
