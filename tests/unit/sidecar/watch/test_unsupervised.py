"""Ranks that need a supervisor wait for it for a bounded time; ranks that train are never touched."""

from __future__ import annotations

import pytest

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import UNFLUSHED, Ending, LauncherState
from sidecar.watch.unsupervised import LIMIT_S, LoneWait, exit_code, later
from tests.unit.supervisor.job_views import launcher, rank

KILLED = Ending(5, signal=9)
VICTIM = Ending(3, 1, fail="distributed", failed_ns=2)
GOOD = Ending(4, 0)
CRASHED = launcher(rank(0, VICTIM), rank(1, KILLED))


@pytest.mark.parametrize(
    ("state", "code"),
    [
        pytest.param(CRASHED, 137, id="the cause counts, although its peers failed earlier"),
        pytest.param(launcher(rank(0), rank(1, KILLED)), 137, id="one of two ranks"),
        pytest.param(launcher(rank(0, VICTIM)), 1, id="the cause is on another member"),
        pytest.param(launcher(rank(0, Ending(5, 7)), rank(1, Ending(6, 9))), 7, id="the first"),
        pytest.param(launcher(rank(0, Ending(5, fail="exception"), state="failing")), 1, id="about to exit"),
        pytest.param(
            launcher(rank(0, Ending(5, 3, unwinding=True, overdue=True), state="failing")),
            3,
            id="its finally blocks take too long",
        ),
        pytest.param(launcher(rank(0, GOOD), rank(1, GOOD)), 0, id="all have finished"),
        pytest.param(launcher(rank(0, Ending(5, 120, fail=UNFLUSHED))), 120, id="output not written"),
        pytest.param(launcher(rank(0), secure_asked=1), exit_codes.TERMINATED, id="frozen by a supervisor"),
    ],
)
def test_ranks_that_need_a_supervisor_determine_the_exit_code(state: LauncherState, code: int) -> None:
    assert exit_code(state) == code


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(None, id="no launcher"),
        pytest.param(launcher(), id="no rank has started"),
        pytest.param(launcher(rank(0), rank(1)), id="training"),
        pytest.param(launcher(rank(0, GOOD), rank(1)), id="one has finished, the other still works"),
        pytest.param(launcher(rank(0, Ending(5, 1, unwinding=True), state="failing")), id="it may recover"),
        pytest.param(launcher(rank(0), generation=2, secure_asked=1), id="thawed in a new generation"),
        pytest.param(launcher(rank(0, KILLED), stopped=True), id="it is ending already"),
    ],
)
def test_no_other_member_is_ended(state: LauncherState | None) -> None:
    assert exit_code(state) is None
    assert later(LoneWait(0.0, 1), state, 0.0, 1e6) is None


def test_the_wait_begins_when_both_a_supervisor_and_ranks_that_train_are_missing() -> None:
    assert later(None, CRASHED, None, 100.0) is None
    assert later(None, launcher(rank(0)), 1.0, 100.0) is None
    wait = later(None, CRASHED, 1.0, 100.0)
    assert wait == LoneWait(100.0, 137), "however long there was no supervisor before"
    assert wait.left_s(100.0) == LIMIT_S


def test_the_wait_is_over_at_its_limit_and_not_before() -> None:
    wait = later(LoneWait(100.0, 137), CRASHED, 1.0, 100.0 + LIMIT_S - 0.01)
    assert wait is not None
    assert wait.left_s(100.0 + LIMIT_S - 0.01) > 0
    assert wait.left_s(100.0 + LIMIT_S) == 0.0


def test_a_supervisor_that_comes_just_before_the_limit_ends_the_wait_and_the_next_one_is_whole() -> None:
    at_s = 100.0 + LIMIT_S - 0.01
    assert later(LoneWait(100.0, 137), CRASHED, None, at_s) is None
    again = later(None, CRASHED, at_s, at_s)
    assert again is not None
    assert again.left_s(at_s) == LIMIT_S


def test_time_in_which_this_process_could_hear_no_supervisor_does_not_count() -> None:
    wait = later(LoneWait(100.0, 137), CRASHED, 1.0, 5000.0, lateness_s=4890.0)
    assert wait is not None
    assert wait.left_s(5000.0) == LIMIT_S - 10.0
    wait = later(LoneWait(100.0, 137), CRASHED, 1.0, 200.0, lateness_s=1e6)
    assert wait is not None
    assert wait.left_s(200.0) == LIMIT_S, "never more than the whole limit"


def test_the_limit_is_longer_than_the_absence_of_a_supervisor_that_comes_back() -> None:
    lost_node_s, tolerated_s, image_s, start_s, lease_s = 50.0, 300.0, 300.0, 60.0, 15.0
    assert lost_node_s + tolerated_s + image_s + start_s + lease_s < LIMIT_S
