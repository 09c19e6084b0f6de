"""Have the survivors of one member copy their state just in time: which ranks to ask, and which to wait for.

One whole copy is enough. A rank that copies holds the one slot of the arena that is free, so a rank that gets
no further with its copy (stopped, or starved by its own main thread) is in the way of all others: it is
killed for them. Its generation is over anyway. One whose copy visibly grows is never in the way, however long
it takes.
"""

from __future__ import annotations

import math
import mmap
import signal
from collections.abc import Iterable
from pathlib import Path

from holdfast.launcher.worker_process import Worker, WorkerProcess, live_workers
from holdfast.process import linux
from holdfast.protocol import progress, rank_channel
from holdfast.protocol.launcher_messages import NO_ROOM, SecureAnswer
from holdfast.protocol.progress import Progress
from holdfast.protocol.rank_channel import WorkerOrder
from holdfast.snapshot import member_directory

NO_GROWTH_S = 0.5  # a copy that does not grow for so long has stopped


class SurvivorSnapshot:
    """The copy of one generation. Once `done` no rank is waited for; later answers change nothing."""

    def __init__(self, directory: Path, generation: int, workers: tuple[Worker, ...]) -> None:
        """`directory` has the ranks' progress pages."""
        self.done = False
        self.answers: dict[int, SecureAnswer] = {}
        self._directory = directory
        self._generation = generation
        self._seats = workers
        self._asked: set[int] = set()
        self._given_up: set[int] = set()
        self._impatient = False
        self._copy = True
        self._copied: dict[int, tuple[int, float]] = {}  # by rank: the counter of pieces, and its last change

    def begin(self, copy: bool = True) -> bool:
        """Ask the ranks at the lowest step for their state, which all can resume from. False if it was begun.

        With `copy` false their state is worth nothing: all are asked, and only to make no further step.

        A rank inside the optimizer's writes has left its private state of the step being made, so it
        counts as one step further. Ranks that are stopped would not answer: they are killed.
        """
        if self.done or self._asked:
            return False
        self._copy = copy
        for _, process in self._survivors():
            if linux.state_of(process.pid)[0] == "T":
                process.kill(signal.SIGKILL)
        steps = {worker: self._position(worker, process) for worker, process in self._survivors()}
        able = {worker: step for worker, step in steps.items() if step is not None}
        # A rank that has only begun holds nothing and is not waited for, and must make no step any more.
        self._send_order(
            worker for worker, process in self._survivors() if worker not in able and _runs(process)
        )
        if able:
            lowest = min(able.values())
            self._ask(worker for worker, step in able.items() if step == lowest or not copy)
        else:
            self.done = True
        return True

    def ask_rest(self) -> None:
        """Ask all ranks that have not been asked yet."""
        if not self.done:
            self._ask(worker for worker, _ in self._survivors() if worker.rank not in self._asked)

    def give_up(self, ranks: Iterable[int]) -> None:
        """Wait for these no longer: they hang. A rank that finds no place for its state gets theirs."""
        self._given_up |= set(ranks)
        self._make_room()
        self._finish()

    def lose_patience(self) -> None:
        """Give up all ranks that have not answered, if another found no place for its whole state."""
        self._impatient = True
        self._make_room()

    def stop(self) -> None:
        """Wait for no rank any more."""
        self.done = True

    def receive(self, answer: SecureAnswer) -> None:
        """Take a rank's answer. A whole copy ends the wait."""
        self.answers[answer.rank] = answer
        self.done = self.done or answer.whole
        self._make_room()
        self._finish()

    def worker_left(self) -> None:
        """Note that a rank has ended."""
        self._finish()

    def watch(self, now_s: float) -> bool:
        """Look at the copies under way; True while the copy of a rank that is waited for grows."""
        growing = False
        for worker, _ in self._survivors():
            if worker.rank in self.answers:
                continue
            count = self._pieces(worker)
            known, since_s = self._copied.get(worker.rank, (count, -math.inf))
            if known != count:
                since_s = now_s
            self._copied[worker.rank] = (count, since_s)
            growing = growing or now_s - since_s < NO_GROWTH_S
        return growing

    def copy_s(self) -> float:
        """Return the seconds that a copy of the state takes on this member, 0 if they are not known."""
        found = [read for worker, _ in self._survivors() if (read := self._read(worker)) is not None]
        return max(map(progress.copy_s, found), default=0.0)

    def _survivors(self) -> list[tuple[Worker, WorkerProcess]]:
        return live_workers(self._seats)

    def _make_room(self) -> None:
        """Kill ranks that may hold a slot and are not waited for, if another found none free; ask that again.

        A rank that has answered is not within a copy; the others may be.
        """
        if self.done:
            return
        answered = {worker for worker, _ in self._survivors() if worker.rank in self.answers}
        refused = [worker for worker in answered if self.answers[worker.rank].why == NO_ROOM]
        silent = [
            process
            for worker, process in self._survivors()
            if worker not in answered and (self._impatient or worker.rank in self._given_up)
        ]
        if refused and silent:
            for process in silent:
                process.kill(signal.SIGKILL)
            for worker in refused:
                del self.answers[worker.rank]
            self._ask(refused)

    def _ask(self, workers: Iterable[Worker]) -> None:
        asked = tuple(workers)
        self._asked |= {worker.rank for worker in asked}
        self._send_order(asked)
        self._finish()

    def _send_order(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            assert worker.process is not None
            try:
                order = WorkerOrder("secure", generation=self._generation, copy=self._copy)
                rank_channel.send(worker.process.control, order, wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def _finish(self) -> None:
        """Stop waiting once no rank is left that could still answer."""
        left = {worker.rank for worker, _ in self._survivors()}
        if self._asked and left <= self._asked and left <= self._given_up | self.answers.keys():
            self.done = True

    def _position(self, worker: Worker, process: WorkerProcess) -> int | None:
        """Return the step that this rank could give, None while it cannot run at all."""
        if not _runs(process):
            return None
        found = self._read(worker)
        return None if found is None else found.step + (found.write_seq & 1)

    def _pieces(self, worker: Worker) -> int:
        view = self._page(worker)
        if view is None:
            return 0
        with view:
            return progress.copied(view)

    def _page(self, worker: Worker) -> mmap.mmap | None:
        try:
            with (self._directory / member_directory.page_name(worker.local_rank)).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None

    def _read(self, worker: Worker) -> Progress | None:
        """Return this rank's page, None when it is not of this generation."""
        view = self._page(worker)
        if view is None:
            return None
        with view:
            found = progress.read(view)
        return found if found is not None and found.generation == self._generation else None


def _runs(process: WorkerProcess) -> bool:
    return not process.killed and linux.state_of(process.pid)[0] not in "TZXt"
