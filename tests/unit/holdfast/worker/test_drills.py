from __future__ import annotations

import os
import threading

import pytest

from holdfast.protocol.drills import EXIT_CODE
from holdfast.worker.drills import RankDrill
from tests.sandbox import in_child


def test_a_nan_drill_is_held_until_there_is_a_state_and_taken_once() -> None:
    drill = RankDrill()
    drill.obey("nan")
    assert drill.take_nan()
    assert not drill.take_nan()


def test_a_nan_drill_spoils_an_existing_state_immediately() -> None:
    drill, poisoned = RankDrill(), []
    drill.obey("nan", lambda: poisoned.append(True))
    assert poisoned == [True]
    assert not drill.take_nan()


def test_without_a_drill_a_step_is_not_held() -> None:
    RankDrill().hang()


@pytest.mark.parametrize("name", ["hang", "spin"])
def test_a_rank_that_is_to_hang_or_spin_never_begins_its_next_step(name: str) -> None:
    def child() -> None:
        drill = RankDrill()
        drill.obey(name, lambda: None)
        stepping = threading.Thread(target=drill.hang, daemon=True)
        stepping.start()
        stepping.join(0.05)
        assert stepping.is_alive()

    assert in_child(child) == 0


def test_the_exit_code_is_the_one_in_the_table() -> None:
    status = in_child(lambda: RankDrill().obey("exit"))
    assert os.waitstatus_to_exitcode(status) == EXIT_CODE
