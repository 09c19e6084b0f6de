from __future__ import annotations

import math
import mmap
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol import progress
from holdfast.protocol.member_messages import UncommittedWork
from holdfast.protocol.progress import Phase
from holdfast.protocol.progress_writer import Page
from sidecar.watch.late_ranks import HangPolicy
from sidecar.watch.progress_monitor import SOON_S, ProgressMonitor
from tests.sandbox import memory_directory

POLICY = HangPolicy(floor_s=0.5, few_floor_s=0.5, few_factor=1.0, first_step_s=2.0)
S = 1_000_000_000


@pytest.fixture
def here() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


class Rank:
    """A rank that writes its page with a simulated clock."""

    def __init__(self, here: Path, generation: int = 1) -> None:
        self.now_ns = 100 * S
        self.page = Page.create(here / "page-0.bin", lambda: self.now_ns)
        self.page.begin(generation, 0, 0, 77, 0)

    def does(self, step: int, loss: float = 0.5, norm: float = 0.5, flops: float = 0.0) -> None:
        self.now_ns += S // 10
        self.page.commit(step, loss, norm, 8, 64, flops, 0)


def test_the_report_contains_what_the_page_says_at_that_moment(here: Path) -> None:
    pages = ProgressMonitor(here, 2, POLICY)
    assert pages.progress(1) == ()
    rank = Rank(here)
    pages.poll(1, 0, 0.0)
    rank.does(1)
    rank.does(2, 0.25, math.inf, math.inf)
    [found] = pages.progress(1)
    assert (found.rank, found.step, found.loss, found.grad_norm) == (0, 2, "0.25", "inf")
    assert (found.samples, found.tokens, found.flops) == (16, 128, 0.0)
    assert pages.progress(2) == ()


def test_the_label_of_a_pause_is_reported_only_during_the_pause(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 2, POLICY)
    rank.does(1)
    rank.page.pause(Phase.EVAL, "validation")
    pages.poll(1, rank.now_ns, 0.0)
    assert pages.progress(1)[0].label == "validation"
    rank.does(2)
    pages.poll(1, rank.now_ns, 0.0)
    assert pages.progress(1)[0].label == ""


def test_the_next_check_is_due_when_the_limit_of_the_first_rank_expires(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 2, POLICY)
    assert pages.left_s == math.inf
    rank.does(1)
    pages.poll(1, rank.now_ns + S // 2, 0.0)
    assert pages.left_s == pytest.approx(1.5)
    for step in range(2, 30):
        rank.does(step)
        pages.poll(1, rank.now_ns, 0.0)
    assert pages.left_s == pytest.approx(0.5 + 3 * 0.1)
    at_ns = rank.now_ns + round((pages.left_s + 0.001) * S)
    [stall] = pages.poll(1, at_ns, 0.0)
    assert stall.rank == 0
    assert pages.left_s == math.inf, "a late rank is read at each poll, because it may continue"
    pages.poll(2, at_ns, 0.0)
    assert pages.left_s == math.inf, "the page is of another generation"


def test_the_report_contains_a_ranks_own_time_once_there_is_a_window_of_it(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    for step in range(1, 70):
        rank.page.phase(Phase.FORWARD)
        rank.now_ns += S // 50
        rank.page.phase(Phase.BACKWARD)
        rank.does(step)
        pages.poll(1, rank.now_ns, 0.0)
        if step == 50:
            assert pages.progress(1)[0].own_s == 0
    [found] = pages.progress(1)
    assert (found.own_s, found.own_least_s, found.own_data_s) == (0.02, 0.02, 0.0)
    assert found.own_steps >= 50
    rank.page.begin(2, 0, 0, 78, 0)
    rank.page.phase(Phase.DATA)
    assert pages.progress(2)[0].own_s == 0  # not even before the next poll


def test_a_replaced_page_is_read_again(here: Path) -> None:
    pages = ProgressMonitor(here, 1, POLICY)
    Rank(here).does(5)
    pages.poll(1, 0, 0.0)
    (here / "page-0.bin").unlink()
    Rank(here, 2).does(1)
    assert [each.step for each in pages.progress(2)] == [1]


def test_a_page_is_decoded_again_only_after_it_has_changed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, pages, decoded = Rank(here), ProgressMonitor(here, 1, POLICY), []

    def counted(buffer: mmap.mmap) -> progress.Progress | None:
        decoded.append(buffer)
        return read(buffer)

    read = progress.read
    monkeypatch.setattr(progress, "read", counted)
    for step in (1, 2):
        rank.does(step)
        pages.poll(1, rank.now_ns, 0.0)
        assert [each.step for each in pages.raw(1)] == [each.step for each in pages.progress(1)] == [step]
        assert len(decoded) == step


def test_a_page_in_the_middle_of_a_write_keeps_its_previous_content(here: Path) -> None:
    Rank(here).does(3)
    pages = ProgressMonitor(here, 1, POLICY)
    assert [each.step for each in pages.progress(1)] == [3]
    with (here / "page-0.bin").open("r+b") as file:
        file.seek(16)
        file.write((1).to_bytes(8, "little"))  # odd: the writer died during a write
    assert [each.step for each in pages.progress(1)] == [3]
    [torn] = pages.raw(1)
    assert torn.torn


@pytest.mark.parametrize("content", [b"", b"x" * 4096, b"holdfast" + bytes(4088)])
def test_files_that_are_not_pages_are_ignored(here: Path, content: bytes) -> None:
    (here / "page-0.bin").write_bytes(content)
    pages = ProgressMonitor(here, 1, POLICY)
    assert pages.poll(1, 0, 0.0) == []
    assert pages.progress(1) == ()
    assert pages.raw(1) == ()


def test_a_stalled_rank_is_reported_with_its_activity(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    for step in range(1, 5):
        rank.does(step)
    rank.page.phase(Phase.BACKWARD)
    assert pages.poll(1, rank.now_ns + S // 2, 0.0) == []
    [stall] = pages.poll(1, rank.now_ns + 3 * S, 0.0)
    assert (stall.rank, stall.generation, stall.step, stall.phase_name) == (0, 1, 4, "backward")
    assert (stall.stalled_s, stall.limit_s) == (3.0, 0.5)
    assert pages.poll(2, rank.now_ns + 3 * S, 0.0) == []
    rank.does(5)
    assert pages.poll(1, rank.now_ns, 0.0) == []


def test_a_step_that_is_longer_than_most_is_reported_early_and_again_at_its_limit(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, HangPolicy())
    for step in range(1, 40):
        rank.does(step)
        rank.now_ns += 20 * S * (step == 30)
    began_ns = rank.now_ns
    assert pages.poll(1, began_ns + 4 * S, 0.0) == []
    assert pages.left_s == pytest.approx(1.0)
    [early] = pages.poll(1, began_ns + 6 * S, 0.0)
    assert (early.early_s, early.limited) == (5.0, False)
    assert early.limit_s == pytest.approx(60.9)
    assert pages.left_s == pytest.approx(54.9)
    [late] = pages.poll(1, began_ns + 61 * S, 0.0)
    assert late.early_s == 0.0


def test_a_declared_pause_has_its_own_limit_and_name(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    rank.does(1)
    rank.page.pause(Phase.EVAL, "validation", 30.0)
    assert pages.poll(1, rank.now_ns + 29 * S, 0.0) == []
    [stall] = pages.poll(1, rank.now_ns + 31 * S, 0.0)
    assert stall.phase_name == "eval"
    assert pages.progress(1)[0].label == "validation"


def test_lateness_of_the_sidecar_is_not_counted_against_a_rank(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    for step in range(1, 5):
        rank.does(step)
    assert pages.poll(1, rank.now_ns + S // 10, 0.0) == []
    assert pages.poll(1, rank.now_ns + 3 * S, own_lateness_s=2.8) == []
    assert len(pages.poll(1, rank.now_ns + 4 * S, 0.0)) == 1
    rank.page.phase(Phase.FORWARD)
    rank.does(5)
    rank.page.phase(Phase.DATA)
    assert len(pages.poll(1, rank.now_ns + S, 0.0)) == 1  # it is forgotten with the step in which it occurred


def test_lateness_of_the_sidecar_is_not_counted_even_if_the_rank_has_just_moved_on(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    for step in range(1, 5):
        rank.does(step)
    assert pages.poll(1, rank.now_ns + S // 20, 0.0) == []
    rank.does(5)
    assert pages.poll(1, rank.now_ns + 3 * S, own_lateness_s=2.9) == []
    rank.now_ns += 3 * S
    rank.page.phase(Phase.BACKWARD)  # it continues in the same step, which the machine's pause has lengthened
    assert pages.poll(1, rank.now_ns + S // 10, 0.0) == []


def test_lateness_from_before_a_step_does_not_excuse_that_step(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    for step in range(1, 5):
        rank.does(step)
    assert pages.poll(1, rank.now_ns + S // 2, own_lateness_s=60.0) == []
    assert len(pages.poll(1, rank.now_ns + 2 * S, 0.0)) == 1


def test_work_before_a_commit_is_detected(here: Path) -> None:
    """The page of a process that is ending or stopped looks the same as that of a working one."""
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    asleep = subprocess.Popen(["sleep", "600"])
    try:
        rank.page.begin(1, 0, 0, asleep.pid, 0)
        for step in range(1, 12):
            works(rank, step)
        seen(rank, pages, 6)
        [found] = pages.progress(1, rank.now_ns)
        assert found.early is None, "a forward pass is not such work"
        rank.page.written()
        seen(rank, pages, 6)
        assert pages.left_s == SOON_S, "otherwise the work could end before the next poll"
        [found] = pages.progress(1, rank.now_ns + S)
        assert told(found.early) == (0.3, 0.01, False, 0.0)
        asleep.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asleep.pid, os.WSTOPPED)
        seen(rank, pages, 6)
        asleep.kill()
        asleep.wait()
        seen(rank, pages, 6)
        [found] = pages.progress(1, rank.now_ns)
        assert told(found.early) == (0.3, 0.01, False, 0.0)
        rank.page.writes_more()
        [found] = pages.progress(1, rank.now_ns)
        assert found.early is None, "it was only one of two optimizers"
    finally:
        asleep.kill()
        asleep.wait()


def test_a_pause_within_a_step_is_reported_with_its_limit(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    works(rank, 1)
    works(rank, 2)
    rank.page.phase(Phase.DATA)
    rank.page.phase(Phase.FORWARD)
    rank.page.pause(Phase.CHECKPOINT, "checkpoint", 60.0)
    rank.now_ns += S
    [found] = pages.progress(1, rank.now_ns)
    assert told(found.early) == (1.0, 0.01, True, 59.0)
    assert pages.uncommitted(1, rank.now_ns) == {0}
    rank.page.copy_begins(10.0)
    [found] = pages.progress(1, rank.now_ns)
    assert found.early is not None
    assert found.early.declared, "this also holds while Holdfast copies the state first"
    rank.page.copy_ends()
    rank.page.resume()
    [found] = pages.progress(1, rank.now_ns)
    assert found.early is None
    works(rank, 3)
    rank.page.commit(3, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    rank.page.pause(Phase.EVAL, "eval", 60.0)
    [found] = pages.progress(1, rank.now_ns + S)
    assert found.early is None, "after the commit"
    assert found.tail_s == pytest.approx(1.0)


def told(early: UncommittedWork | None) -> tuple[float, float, bool, float] | None:
    if early is None:
        return None
    return round(early.seconds, 3), round(early.usual_s, 3), early.declared, early.left_s


def works(rank: Rank, step: int) -> None:
    """Do a step whose optimizer has written 10 ms before its commit."""
    rank.now_ns += 9 * S // 100
    rank.page.phase(Phase.DATA)
    rank.page.written()
    rank.now_ns += S // 100
    rank.page.commit(step, 0.5, 0.5, 8, 64, 0.0, 0)


def seen(rank: Rank, pages: ProgressMonitor, times: int) -> None:
    for _ in range(times):
        rank.now_ns += S // 20
        pages.poll(1, rank.now_ns, 0.0)


def test_each_step_time_is_learned_once_and_kept_over_generations(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    for step in range(1, 6):
        rank.does(step)
        pages.poll(1, 0, 0.0)
        pages.poll(1, 0, 0.0)
    assert len(pages._watched[0].stats.times_s) == 4  # the first step is not typical
    rank.page.begin(2, 0, 0, 78, 5)
    rank.does(6)
    rank.does(7)
    pages.poll(2, 0, 0.0)
    assert len(pages._watched[0].stats.times_s) == 5


def test_a_copy_by_holdfast_is_not_work_after_a_commit(here: Path) -> None:
    """If a rank is killed during a copy, no work of the script is left undone."""
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    rank.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    rank.now_ns += S
    rank.page.pause(Phase.EVAL, "eval", 60.0)
    rank.page.copy_begins(10.0)
    rank.now_ns += 5 * S
    [found] = pages.progress(1, rank.now_ns)
    assert found.tail_s == pytest.approx(1.0)
    rank.page.copy_ends()
    rank.now_ns += S
    [found] = pages.progress(1, rank.now_ns)
    assert found.tail_s == pytest.approx(2.0)


def test_for_a_pause_after_a_commit_the_report_states_whether_the_rank_has_left_it(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)

    def told() -> tuple[bool, bool]:
        """Return whether the rank counts as working after its commit, and whether the work is declared."""
        [found] = pages.progress(1, rank.now_ns)
        return found.tail_s > 0, found.tail_declared

    rank.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    rank.page.tail_begins()
    rank.page.copy_begins(10.0)
    assert told() == (False, False), "a snapshot was due"
    rank.page.copy_ends()
    assert told() == (True, False)
    for phase in (Phase.EVAL, Phase.CHECKPOINT, Phase.PAUSED):
        rank.page.pause(phase, "work", 60.0)
        assert told() == (True, True)
        rank.page.copy_begins(10.0)
        assert told() == (True, True), "Holdfast's own copy before the work in it"
        rank.page.copy_ends()
        assert told() == (True, True)
        rank.page.resume(Phase.TAIL)
        assert told() == (True, False)
    rank.page.phase(Phase.IDLE)
    rank.page.copy_begins(10.0)
    assert told() == (True, False), "after the loop"
    rank.page.copy_ends()
    rank.page.pause(Phase.EVAL, "eval", 60.0)
    assert told() == (True, True)


def test_only_what_the_script_does_after_a_commit_counts_as_its_work(here: Path) -> None:
    """A large process takes long to end after it is killed, and its page does not change in that time."""
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)

    def tail_s() -> float:
        """Return the reported tail of a rank that was just killed and whose end is noticed a second later."""
        [found] = pages.progress(1, 0, {0: rank.now_ns + S})
        return found.tail_s

    rank.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    rank.now_ns += S // 10
    assert 0 < tail_s() < 0.001  # within commit()
    rank.page.tail_begins()
    rank.now_ns += S
    assert tail_s() == pytest.approx(2.1)
    rank.page.tail_is_over()
    assert tail_s() == pytest.approx(1.1)
    rank.page.phase(Phase.DATA)
    assert tail_s() == 0.0
    rank.page.tail_is_over()
    assert tail_s() == 0.0


def test_the_time_in_which_a_rank_is_stopped_is_not_work_after_its_commit(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    asleep = subprocess.Popen(["sleep", "600"])

    def tail_s() -> float:
        [found] = pages.progress(1, rank.now_ns)
        return found.tail_s

    try:
        rank.page.begin(1, 0, 0, asleep.pid, 0)
        rank.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
        rank.page.tail_begins()
        seen(rank, pages, 2)
        worked_s = tail_s()
        assert worked_s == pytest.approx(0.1, abs=0.11)
        asleep.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asleep.pid, os.WSTOPPED)
        seen(rank, pages, 20)
        assert tail_s() == pytest.approx(worked_s)
        rank.now_ns += S
        assert tail_s() == pytest.approx(worked_s), "only the time until it was stopped counts"
        rank.now_ns -= S
        asleep.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, asleep.pid, os.WCONTINUED)
        seen(rank, pages, 20)
        later_s = tail_s()
        assert later_s > worked_s + 0.5
        rank.page.tail_is_over()
        asleep.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asleep.pid, os.WSTOPPED)
        seen(rank, pages, 20)
        assert tail_s() == pytest.approx(later_s, abs=0.11), "the earlier work still counts"
    finally:
        asleep.kill()
        asleep.wait()


def test_a_removed_page_is_read_as_long_as_its_rank_writes_it(here: Path) -> None:
    rank, pages = Rank(here), ProgressMonitor(here, 1, POLICY)
    rank.does(1)
    pages.poll(1, 0, 0.0)
    (here / "page-0.bin").unlink()
    rank.does(2)
    assert [each.step for each in pages.progress(1)] == [2]
