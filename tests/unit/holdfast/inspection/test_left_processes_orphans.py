"""Orphans are attributed to a dead rank, or left alone."""

from __future__ import annotations

import os

import pytest

from holdfast.inspection.left_processes import Origin, is_left, origin

PRESENT = {20: 200, 21: 210}  # pid and start time
PAST = {10: 100, 11: 110}


@pytest.mark.parametrize(
    ("orphan", "left"),
    [
        (Origin(20, 300), False),  # a server that a living rank has put in the background
        (Origin(20, 300, 1), False),
        (Origin(10, 300), True),  # a worker of a dead rank
        (Origin(10, 300, 2), True),
        (Origin(77, 300, 2), False),  # in its own session
        (Origin(77, 300, 1), True),
        (Origin(77, 150), True),  # older than all living ranks
        (Origin(77, 300), False),
        (Origin(77, 205), False),
        (Origin(77, 50), False),  # older than all ranks: started by an import of the script
    ],
)
def test_an_orphan_is_left_behind_only_if_no_living_rank_can_have_started_it(
    orphan: Origin, left: bool
) -> None:
    assert is_left(orphan, PRESENT, PAST, 2) is left


def test_no_orphan_is_left_behind_before_a_rank_has_ended() -> None:
    assert not is_left(Origin(77, 150), PRESENT, {}, 1)


def test_the_session_and_start_of_a_process_are_read() -> None:
    found = origin(os.getpid())
    assert found is not None
    assert found.session == os.getsid(0)
    assert found.began > 0
    assert origin(2**22 + 1) is None
