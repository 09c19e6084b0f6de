"""Which ranks are asked for a copy, waited for or killed: with real processes, sockets and pages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.launcher.survivor_snapshot import NO_GROWTH_S, SurvivorSnapshot
from holdfast.launcher.worker_process import Worker, WorkerProcess
from holdfast.protocol import rank_channel
from holdfast.protocol.launcher_messages import NO_ROOM, RankStart, SecureAnswer
from holdfast.protocol.progress_writer import Page
from holdfast.protocol.rank_channel import WorkerOrder

GENERATION = 3
SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")


@dataclass
class Place:
    """A member with some ranks: sleeping processes, each with a page that says it is at a step."""

    folder: Path
    workers: tuple[Worker, ...]
    ends: tuple[socket.socket, ...]  # the ranks' ends of their lines
    children: tuple[subprocess.Popen[bytes], ...]

    def securing(self) -> SurvivorSnapshot:
        return SurvivorSnapshot(self.folder, GENERATION, self.workers)

    def asked(self) -> list[int]:
        """Return the ranks that have been asked since the last call."""
        found = []
        for rank, end in enumerate(self.ends):
            end.setblocking(False)
            try:
                order, _ = rank_channel.receive(end, WorkerOrder)
            except BlockingIOError:
                continue
            assert (order.what, order.generation) == ("secure", GENERATION)
            found.append(rank)
        return found

    def stop(self, rank: int) -> None:
        """Stop a process; return when it is."""
        os.kill(self.children[rank].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.children[rank].pid, os.WSTOPPED | os.WNOWAIT)

    def is_killed(self, rank: int) -> bool:
        process = self.workers[rank].process
        return process is not None and process.killed == signal.SIGKILL

    def leaves(self, securing: SurvivorSnapshot, rank: int) -> None:
        """The launcher sees a process end."""
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


def test_those_at_the_lowest_step_are_asked_first_and_one_whole_copy_ends_it(place: Place) -> None:
    securing = place.securing()
    assert securing.begin()
    assert place.asked() == [0, 1]
    assert not securing.begin()
    securing.receive(SecureAnswer(1, 7, True))
    assert securing.done
    securing.ask_rest()
    assert place.asked() == []


def test_one_that_has_only_begun_is_told_as_well_and_is_not_waited_for(place: Place) -> None:
    """Its page says nothing of this generation yet."""
    for rank in (0, 1):
        (place.folder / f"page-{rank}.bin").unlink()
    place.stop(1)
    securing = place.securing()
    assert securing.begin()
    assert place.asked() == [0, 2]
    assert place.is_killed(1)
    securing.receive(SecureAnswer(2, 8, True))
    assert securing.done


def test_a_group_that_has_only_begun_is_told_and_not_waited_for(place: Place) -> None:
    for rank in range(3):
        (place.folder / f"page-{rank}.bin").unlink()
    securing = place.securing()
    assert securing.begin()
    assert securing.done
    assert place.asked() == [0, 1, 2]


def test_all_others_are_asked_later_and_it_ends_when_all_have_answered(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.receive(SecureAnswer(0, 7, False, "inside the optimizer's writes"))
    securing.ask_rest()
    assert place.asked() == [0, 1, 2]
    for rank in (1, 2):
        assert not securing.done
        securing.receive(SecureAnswer(rank, 8, False, "inside the optimizer's writes"))
    assert securing.done


def test_a_rank_that_is_stopped_is_killed_and_not_asked(place: Place) -> None:
    place.stop(0)
    securing = place.securing()
    securing.begin()
    assert (place.is_killed(0), place.is_killed(1), place.asked()) == (True, False, [1])


def test_a_rank_that_hangs_is_asked_and_waited_for_no_longer_than_told(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.ask_rest()
    assert place.asked() == [0, 1, 2]
    securing.give_up((0, 1))
    assert not securing.done
    securing.receive(SecureAnswer(2, 8, False, "inside the optimizer's writes"))
    assert securing.done
    assert not place.is_killed(0)


def test_who_does_not_answer_is_killed_for_one_that_has_no_room_and_that_is_asked_again(place: Place) -> None:
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


def test_who_hangs_is_killed_for_one_that_has_no_room_before_the_others_are(place: Place) -> None:
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


def test_one_that_finds_no_room_late_has_it_made_at_once(place: Place) -> None:
    securing = place.securing()
    securing.begin()
    securing.ask_rest()
    place.asked()
    securing.give_up_silent()
    assert not any(map(place.is_killed, range(3)))
    securing.receive(no_room(1))
    assert [place.is_killed(rank) for rank in range(3)] == [True, False, True]
    assert place.asked() == [1]


def test_nobody_is_killed_when_somebody_is_whole_or_it_is_over(place: Place) -> None:
    for over in (lambda each: each.receive(SecureAnswer(2, 8, True)), SurvivorSnapshot.stop):
        securing = place.securing()
        securing.begin()
        securing.receive(no_room(1))
        over(securing)
        securing.give_up_silent()
        assert not any(map(place.is_killed, range(3)))


def test_ranks_whose_state_is_bad_are_all_asked_at_once_and_all_are_waited_for(place: Place) -> None:
    securing = place.securing()
    assert securing.begin(copy=False)
    assert sorted(place.asked()) == [0, 1, 2]
    for number in range(3):
        assert not securing.done
        securing.receive(SecureAnswer(number, 8, False, "it is as bad as the state that was found bad"))
    assert securing.done


def test_where_nobody_can_run_there_is_nobody_to_wait_for(place: Place) -> None:
    for rank in range(3):
        place.stop(rank)
    securing = place.securing()
    assert securing.begin()
    assert securing.done


def test_the_dearest_copy_is_known_from_the_pages(place: Place) -> None:
    assert place.securing().copy_s() == 1.0
    assert SurvivorSnapshot(place.folder, GENERATION + 1, place.workers).copy_s() == 0.0


def test_a_copy_that_grows_is_seen_from_outside(place: Place) -> None:
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


def test_before_the_first_copy_its_time_follows_from_the_bytes_or_from_earlier_ones(place: Place) -> None:
    with closing(Page.attach(place.folder / "page-0.bin")) as page:
        page.note_state(6 << 30, 0.0)
    assert place.securing().copy_s() == 6.0
    with closing(Page.attach(place.folder / "page-1.bin")) as page:
        page.note_state(1 << 30, 7.5)
    assert place.securing().copy_s() == 7.5
