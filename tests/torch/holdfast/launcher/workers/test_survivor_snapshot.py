"""The launcher orders ranks to copy, waits for them or kills them: with real processes and sockets."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.launcher.workers.survivor_snapshot import NO_GROWTH_S, SurvivorSnapshot
from holdfast.launcher.workers.worker_process import Worker, WorkerProcess
from holdfast.protocol import progress, rank_channel
from holdfast.protocol.launcher_messages import NO_ROOM, RankStart, SecureAnswer
from holdfast.protocol.progress_writer import Page
from holdfast.protocol.rank_channel import WorkerOrder

GENERATION = 3
SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")


@dataclass
class Place:
    """A member with some ranks: sleeping processes, each with a page that shows a step."""

    folder: Path
    workers: tuple[Worker, ...]
    ends: tuple[socket.socket, ...]  # the ranks' ends of their sockets
    children: tuple[subprocess.Popen[bytes], ...]

    def securing(self) -> SurvivorSnapshot:
        return SurvivorSnapshot(self.folder, GENERATION, self.workers)

    def asked(self) -> list[int]:
        """Return the ranks that have received the order since the last call."""
        found = []
        for rank, end in enumerate(self.ends):
            end.setblocking(False)
            try:
                order, _ = rank_channel.receive(end, WorkerOrder)
            except BlockingIOError:
                continue
            assert (order.do, order.generation) == ("secure", GENERATION)
            found.append(rank)
        return found

    def stop(self, rank: int) -> None:
        """Stop a process, and wait until it has stopped."""
        os.kill(self.children[rank].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.children[rank].pid, os.WSTOPPED | os.WNOWAIT)

    def is_killed(self, rank: int) -> bool:
        process = self.workers[rank].process
        return process is not None and process.killed == signal.SIGKILL

    def leaves(self, securing: SurvivorSnapshot, rank: int) -> None:
        """Make the launcher notice the end of a process."""
        assert self.children[rank].wait(20) == -signal.SIGKILL
        self.workers[rank].exited = True
        securing.worker_left()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with_three = _place(tmp_path, steps=(7, 7, 8))
    yield with_three
    for child, worker, end in zip(with_three.children, with_three.workers, with_three.ends, strict=True):
        child.kill()
        child.wait()
        assert worker.process is not None
        worker.process.close()
        end.close()


def _place(folder: Path, steps: tuple[int, ...]) -> Place:
    workers, ends, children = [], [], []
    for rank, step in enumerate(steps):
        page = Page.create(folder / f"page-{rank}.bin")
        page.begin(GENERATION, rank, rank, 1, step)
        page.note_snapshot(step, 0.5 * rank)
        page.close()
        ours, theirs = rank_channel.pair()
        child = subprocess.Popen(SLEEPER, start_new_session=True)
        process = WorkerProcess(rank, ours, folder / "log", child.pid)
        workers.append(Worker(rank, rank, RankStart(rank, rank), process))
        ends.append(theirs)
        children.append(child)
    return Place(folder, tuple(workers), tuple(ends), tuple(children))


def no_room(rank: int) -> SecureAnswer:
    return SecureAnswer(rank, 7, False, NO_ROOM)


def test_a_rank_that_was_preempted_while_it_wrote_its_page_is_asked_and_waited_for(place: Place) -> None:
    """Without it, the steps since the last scheduled snapshot would be lost."""
    for rank in range(3):
        with (place.folder / f"page-{rank}.bin").open("r+b") as file:
            file.seek(progress.SEQ_INDEX * 8)
            (sequence,) = struct.unpack("<Q", file.read(8))
            file.seek(progress.SEQ_INDEX * 8)
            file.write(struct.pack("<Q", sequence | 1))
    securing = place.securing()
    assert securing.begin()
    assert not securing.done
    assert place.asked() == [0, 1]
    securing.receive(SecureAnswer(0, 7, True))
    assert securing.done


def test_the_ranks_at_the_lowest_step_are_asked_first_and_one_complete_copy_is_enough(place: Place) -> None:
    securing = place.securing()
    assert securing.begin()
    assert place.asked() == [0, 1]
    assert not securing.begin()
    securing.receive(SecureAnswer(1, 7, True))
    assert securing.done
    securing.ask_rest()
    assert place.asked() == []


def test_a_rank_that_has_only_begun_also_receives_the_order_and_is_not_waited_for(place: Place) -> None:
    """Its page shows nothing of this generation yet."""
    for rank in (0, 1):
        (place.folder / f"page-{rank}.bin").unlink()
    place.stop(1)
    securing = place.securing()
    assert securing.begin()
    assert place.asked() == [0, 2]
    assert place.is_killed(1)
    securing.receive(SecureAnswer(2, 8, True))
    assert securing.done


def test_a_group_that_has_only_begun_receives_the_order_and_is_not_waited_for(place: Place) -> None:
    for rank in range(3):
        (place.folder / f"page-{rank}.bin").unlink()
    securing = place.securing()
    assert securing.begin()
    assert securing.done
    assert place.asked() == [0, 1, 2]


def test_all_other_ranks_are_asked_later_and_all_answers_are_awaited(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.receive(SecureAnswer(0, 7, False, "inside the optimizer's writes"))
    securing.ask_rest()
    assert place.asked() == [0, 1, 2]
    for rank in (1, 2):
        assert not securing.done
        securing.receive(SecureAnswer(rank, 8, False, "inside the optimizer's writes"))
    assert securing.done


def test_a_stopped_rank_is_killed_and_not_asked(place: Place) -> None:
    place.stop(0)
    securing = place.securing()
    securing.begin()
    assert (place.is_killed(0), place.is_killed(1), place.asked()) == (True, False, [1])


def test_a_hung_rank_is_asked_but_no_longer_awaited_once_it_is_given_up(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.ask_rest()
    assert place.asked() == [0, 1, 2]
    securing.give_up((0, 1))
    assert not securing.done
    securing.receive(SecureAnswer(2, 8, False, "inside the optimizer's writes"))
    assert securing.done
    assert not place.is_killed(0)


def test_a_silent_rank_is_killed_for_a_rank_without_a_free_slot_which_is_asked_again(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.receive(no_room(1))
    securing.ask_rest()
    securing.receive(SecureAnswer(2, 8, False, "this is generation 4"))
    assert place.asked() == [0, 1, 2]
    securing.give_up_silent()
    assert (place.is_killed(0), place.is_killed(1), place.is_killed(2)) == (True, False, False)
    assert place.asked() == [1]
    place.leaves(securing, 0)
    assert not securing.done
    securing.receive(SecureAnswer(1, 7, True))
    assert securing.done


def test_a_hung_rank_is_killed_before_others_for_a_rank_without_a_free_slot(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.ask_rest()
    place.asked()
    securing.give_up((0,))
    assert not any(map(place.is_killed, range(3)))
    securing.receive(no_room(1))
    assert [place.is_killed(rank) for rank in range(3)] == [True, False, False]
    assert place.asked() == [1]
    place.leaves(securing, 0)
    securing.receive(SecureAnswer(2, 8, False, "inside the optimizer's writes"))
    assert not securing.done
    securing.receive(SecureAnswer(1, 7, True))
    assert securing.done


def test_silent_ranks_are_killed_at_once_for_a_rank_that_finds_no_free_slot_late(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.ask_rest()
    place.asked()
    securing.give_up_silent()
    assert not any(map(place.is_killed, range(3)))
    securing.receive(no_room(1))
    assert [place.is_killed(rank) for rank in range(3)] == [True, False, True]
    assert place.asked() == [1]


def test_no_rank_is_killed_once_a_copy_is_complete_or_the_securing_has_stopped(place: Place) -> None:
    for over in (lambda each: each.receive(SecureAnswer(2, 8, True)), SurvivorSnapshot.stop):
        securing = place.securing()
        securing.begin()
        securing.receive(no_room(1))
        over(securing)
        securing.give_up_silent()
        assert not any(map(place.is_killed, range(3)))


def test_ranks_with_a_bad_state_are_all_asked_at_once_and_all_awaited(place: Place) -> None:
    securing = place.securing()
    assert securing.begin(copy=False)
    assert sorted(place.asked()) == [0, 1, 2]
    for number in range(3):
        assert not securing.done
        securing.receive(SecureAnswer(number, 8, False, "the state was found to be bad, so it is not copied"))
    assert securing.done


def test_no_rank_is_awaited_if_none_can_run(place: Place) -> None:
    for rank in range(3):
        place.stop(rank)
    securing = place.securing()
    assert securing.begin()
    assert securing.done


def test_the_time_of_the_slowest_copy_is_read_from_the_pages(place: Place) -> None:
    assert place.securing().copy_s() == 1.0
    assert SurvivorSnapshot(place.folder, GENERATION + 1, place.workers).copy_s() == 0.0


def test_a_growing_copy_is_seen_from_outside(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    assert not securing.watch(100.0)
    with closing(Page.attach(place.folder / "page-1.bin")) as page:
        page.copied()
    assert securing.watch(100.1)
    assert securing.watch(100.1 + NO_GROWTH_S / 2)
    assert not securing.watch(100.2 + NO_GROWTH_S)
    with closing(Page.attach(place.folder / "page-1.bin")) as page:
        page.copied()
    assert securing.watch(102.0)
    securing.receive(SecureAnswer(1, 7, False, "inside the optimizer's writes"))
    assert not securing.watch(102.1)


def test_before_the_first_copy_its_time_is_estimated_from_its_bytes_or_from_earlier_copies(
    place: Place,
) -> None:
    with closing(Page.attach(place.folder / "page-0.bin")) as page:
        page.note_state(6 << 30, 0.0)
    assert place.securing().copy_s() == 6.0
    with closing(Page.attach(place.folder / "page-1.bin")) as page:
        page.note_state(1 << 30, 7.5)
    assert place.securing().copy_s() == 7.5


def test_a_rank_that_copied_its_state_before_it_ends_is_asked_but_not_waited_for(place: Place) -> None:
    securing = place.securing()
    securing.note_copy(SecureAnswer(1, 7, True))
    assert not securing.done, "no rank has been asked to freeze yet"
    assert securing.begin()
    assert place.asked() == [0, 1]
    assert securing.done
    assert securing.answers == {1: SecureAnswer(1, 7, True)}


def test_a_rank_that_copied_its_state_when_it_was_asked_is_not_waited_for(place: Place) -> None:
    securing = place.securing()
    assert securing.begin()
    securing.note_copy(SecureAnswer(0, 7, True))
    assert securing.done


@pytest.mark.parametrize(
    "early",
    [
        SecureAnswer(2, 8, True),  # the other ranks cannot resume from a later step
        SecureAnswer(0, 6, True),  # its page says that it has completed step 7
        SecureAnswer(0, 7, False, NO_ROOM),
    ],
)
def test_an_early_copy_that_the_group_cannot_resume_from_ends_no_wait(
    place: Place, early: SecureAnswer
) -> None:
    securing = place.securing()
    securing.note_copy(early)
    assert securing.begin()
    assert not securing.done
    assert place.asked() == [0, 1]


def test_the_early_copy_of_a_rank_that_continues_ends_no_wait(place: Place) -> None:
    """Its exception was caught, so it may have taken further steps."""
    securing = place.securing()
    securing.note_copy(SecureAnswer(1, 7, True))
    securing.forget_copy(1)
    assert securing.begin()
    assert not securing.done


def test_an_early_copy_of_a_bad_state_ends_no_wait(place: Place) -> None:
    securing = place.securing()
    securing.note_copy(SecureAnswer(1, 7, True))
    assert securing.begin(copy=False)
    assert not securing.done
