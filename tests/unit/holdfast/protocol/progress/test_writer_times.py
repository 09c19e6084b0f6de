"""The page contains the times of steps and pauses, and a rank's own time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.protocol.progress import FailKind, Phase, step_times_s, tail_began_ns, tail_times_s
from holdfast.protocol.progress_writer import Page
from tests.unit.holdfast.fake_page import MS, Clock, commit, seen, started


def test_a_new_generation_keeps_only_the_step_times(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    for step in (42, 43, 44):
        clock.pass_ms(10)
        commit(page, step)
    page.writing(True)
    page.pause(Phase.EVAL, "eval", 60.0)
    page.fail(FailKind.EXCEPTION, 1)
    page.note_snapshot(44, 0.1)
    page.begin(4, 0, 1, 78, 43)
    now = seen(path)
    assert (now.generation, now.rank, now.local_rank, now.pid, now.step) == (4, 0, 1, 78, 43)
    assert (now.phase, now.phase_seq, now.steps_done, now.write_seq) == (Phase.JOINING, 0, 0, 0)
    assert (now.samples, now.tokens, now.flops, now.flags, now.position) == (0, 0, 0.0, 0, -1)
    assert (now.pause_label, now.failed_ns, now.fail_kind, now.snapshot_step) == ("", 0, 0, -1)
    assert math.isnan(now.first_step_s)
    assert step_times_s(path.read_bytes()) == pytest.approx((0.01, 0.01))


def test_the_first_step_of_a_generation_is_not_a_typical_step(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    clock.pass_ms(9000)
    commit(page, 42)
    assert seen(path).first_step_s == 9.0
    assert step_times_s(path.read_bytes()) == ()


def test_pauses_do_not_count_in_the_step_time(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    commit(page, 42)
    clock.pass_ms(10)
    page.pause(Phase.EVAL, "eval")
    clock.pass_ms(5000)
    page.pause(Phase.CHECKPOINT, "save inside")
    clock.pass_ms(5000)
    page.resume()
    assert seen(path).step_started_ns == clock.now_ns
    clock.pass_ms(20)
    page.pause(Phase.PAUSED, "compile")
    clock.pass_ms(5000)
    commit(page, 43)
    clock.pass_ms(7)
    commit(page, 44)
    assert step_times_s(path.read_bytes()) == pytest.approx((0.030, 0.007))


def test_the_hooks_of_an_evaluated_model_do_not_end_the_pause(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    page.pause(Phase.EVAL, "eval", 60.0)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        page.phase(phase)
        assert seen(path).phase is Phase.EVAL
    page.phase(Phase.DATA)
    assert seen(path).phase is Phase.DATA


def own_ms(path: Path) -> tuple[int, int]:
    """Return the sums of data and forward time in the page."""
    now = seen(path)
    return now.data_ns // MS, now.forward_ns // MS


def test_a_ranks_own_time_is_the_time_before_its_backward_passes(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    commit(page, 42)
    for _ in range(3):  # gradient accumulation
        clock.pass_ms(5)
        page.phase(Phase.FORWARD)
        clock.pass_ms(20)
        page.phase(Phase.BACKWARD)
        clock.pass_ms(100)
    page.phase(Phase.OPTIMIZER)
    clock.pass_ms(1000)
    assert own_ms(path) == (0, 0)  # it is reported with the step
    commit(page, 43)
    assert own_ms(path) == (5, 60)
    page.begin(4, 1, 0, 77, 43)
    assert own_ms(path) == (0, 0)


@pytest.mark.parametrize("phases", [(Phase.OPTIMIZER,), (Phase.FORWARD, Phase.OPTIMIZER), (Phase.FORWARD,)])
def test_time_that_may_contain_a_backward_pass_is_not_a_ranks_own(
    path: Path, clock: Clock, phases: tuple[Phase, ...]
) -> None:
    page = started(path, clock)
    commit(page, 42)
    for phase in phases:
        clock.pass_ms(5)
        page.phase(phase)
    clock.pass_ms(5)
    commit(page, 43)
    assert own_ms(path) == (5 * (phases[0] is Phase.FORWARD), 0)


def test_a_wait_before_the_module_itself_is_not_a_ranks_own_time(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    commit(page, 42)
    for phase in (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD):
        clock.pass_ms(7)
        page.phase(phase)
    commit(page, 43)
    assert own_ms(path) == (7, 7)


def test_snapshots_and_pauses_are_not_a_ranks_own_time(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    commit(page, 42)
    clock.pass_ms(30)
    page.note_snapshot(42, 0.028)
    clock.pass_ms(3)
    page.pause(Phase.EVAL, "eval")
    clock.pass_ms(5000)
    page.phase(Phase.FORWARD)
    page.resume()
    clock.pass_ms(4)
    page.phase(Phase.FORWARD)
    page.phase(Phase.BACKWARD)
    commit(page, 43)
    assert own_ms(path) == (2 + 3 + 4, 0)


def test_a_disowned_step_does_not_count_in_any_time(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    for step, disowned in ((42, False), (43, True), (44, False)):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            clock.pass_ms(step)
            page.phase(phase)
        if disowned:
            page.disown()
        commit(page, step)
    assert own_ms(path) == (42 + 44, 42 + 44)


def test_a_skipped_step_leaves_no_trace_but_the_step_number(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    commit(page, 42)
    clock.pass_ms(400)
    page.skip(43)
    clock.pass_ms(5)
    commit(page, 44)
    now = seen(path)
    assert (now.step, now.steps_done, now.samples) == (44, 2, 16)
    assert step_times_s(path.read_bytes()) == pytest.approx((0.005,))


def tail(page: Page, step: int) -> None:
    page.commit(step, 1.0, 2.0, 0, 0, 0.0, 0, -1, Phase.TAIL)


def test_the_work_after_a_commit_is_a_phase_that_ends_only_with_the_next_step(
    path: Path, clock: Clock
) -> None:
    page = started(path, clock)
    tail(page, 42)
    began_ns = clock.now_ns
    clock.pass_ms(5)
    for phase in (
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.TAIL,
    ):  # an evaluation that the script has not declared
        page.phase(phase)
        assert (seen(path).phase, seen(path).phase_since_ns) == (Phase.TAIL, began_ns)
        assert tail_began_ns(seen(path)) == began_ns
    page.phase(Phase.DATA)
    assert (seen(path).phase, tail_began_ns(seen(path))) == (Phase.DATA, 0)
    assert seen(path).step_started_ns == began_ns  # it is part of the next step's time
    tail(page, 43)
    assert seen(path).data_ns == 5 * MS  # as far as is known, the rank did not wait for another one


@pytest.mark.parametrize("outside", [Phase.EVAL, Phase.CHECKPOINT, Phase.PAUSED, Phase.IDLE])
def test_a_pause_and_the_end_of_a_loop_belong_to_the_work_after_the_commit(
    path: Path, clock: Clock, outside: Phase
) -> None:
    page = started(path, clock)
    page.pause(Phase.EVAL, "before any commit")
    assert tail_began_ns(seen(path)) == 0
    page.resume()
    tail(page, 42)
    began_ns = clock.now_ns
    clock.pass_ms(2)
    page.phase(outside)
    clock.pass_ms(3)
    assert (seen(path).phase, tail_began_ns(seen(path))) == (outside, began_ns)
    page.phase(Phase.TAIL)
    assert (seen(path).phase, tail_began_ns(seen(path))) == (Phase.TAIL, began_ns)
    assert seen(path).step_started_ns == clock.now_ns  # the clock of the step stood still
    page.phase(outside)
    page.phase(Phase.DATA)
    assert tail_began_ns(seen(path)) == 0
    page.phase(outside)
    assert tail_began_ns(seen(path)) == 0  # this snapshot was taken within a step


def test_the_times_of_tails_are_stored_beside_the_step_times(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    for step, took in enumerate((1, 2, 30, 4), start=42):
        clock.pass_ms(100)
        tail(page, step)
        page.note_snapshot(step, 0.0)
        clock.pass_ms(took)
        page.phase(Phase.DATA)
    times_s = tail_times_s(path.read_bytes())
    assert times_s == pytest.approx((0.002, 0.03, 0.004))  # that of the first step is a generation's own
    page.begin(4, 1, 0, 77, 45)
    assert tail_began_ns(seen(path)) == 0
    assert tail_times_s(path.read_bytes()) == times_s


def test_a_snapshot_is_not_part_of_the_tail_in_which_it_is_taken(path: Path, clock: Clock) -> None:
    page = started(path, clock)
    for step in (42, 43):
        tail(page, step)
        clock.pass_ms(50)
        page.note_snapshot(step, 0.048)
        page.phase(Phase.DATA)
    assert tail_times_s(path.read_bytes()) == pytest.approx((0.002,))
