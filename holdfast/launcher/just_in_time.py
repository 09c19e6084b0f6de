"""Have the survivors of one member copy their state just in time: who is asked, and who is waited for.

One whole copy is enough. Whoever copies holds the one slot of the arena that is free, so a rank that gets no
further with it (stopped, or starved by its own main thread) is in the way of all others: it is killed for
them. Its generation is over anyway. One whose copy visibly grows is never in the way, however long it takes.
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

STILL_S = 0.5  # a copy that does not grow for so long has stopped


class JustInTimeSnapshot:
    """Of one generation. `done` once nobody is waited for any more; what comes then changes nothing."""

    def __init__(self, directory: Path, generation: int, seats: tuple[Worker, ...]) -> None:
        """`directory` has the ranks' progress pages."""
        self.done = False
        self.answers: dict[int, SecureAnswer] = {}
        self._directory = directory
        self._generation = generation
        self._seats = seats
        self._asked: set[int] = set()
        self._given_up: set[int] = set()
        self._impatient = False
        self._copied: dict[int, tuple[int, float]] = {}  # by rank: the counter of pieces, and since when

    def begin(self) -> bool:
        """Ask those at the lowest step for their state: what they hold, all can have. False if it was begun.

        A rank inside the optimizer's writes has left its private state of the step being made, so it
        counts as one step further. Those that are stopped answer nothing, and are killed.
        """
        if self.done or self._asked:
            return False
        for _, process in self._survivors():
            if linux.state_of(process.pid)[0] == "T":
                process.kill(signal.SIGKILL)
        steps = {seat: self._position(seat, process) for seat, process in self._survivors()}
        able = {seat: step for seat, step in steps.items() if step is not None}
        # Who has begun only now holds nothing and is waited for by nobody, and is to make no step any more.
        self._tell(seat for seat, process in self._survivors() if seat not in able and _runs(process))
        if able:
            lowest = min(able.values())
            self._ask(seat for seat, step in able.items() if step == lowest)
        else:
            self.done = True
        return True

    def ask_rest(self) -> None:
        """Ask all who have not been asked yet."""
        if not self.done:
            self._ask(seat for seat, _ in self._survivors() if seat.rank not in self._asked)

    def give_up(self, ranks: Iterable[int]) -> None:
        """Wait for these no longer: they hang. One that finds no place for its state has theirs."""
        self._given_up |= set(ranks)
        self._make_room()
        self._finish()

    def lose_patience(self) -> None:
        """Give up whoever has not answered, for one that found no place for its whole state."""
        self._impatient = True
        self._make_room()

    def stop(self) -> None:
        """Wait for nobody any more."""
        self.done = True

    def hear(self, answer: SecureAnswer) -> None:
        self.answers[answer.rank] = answer
        self.done = self.done or answer.whole
        self._make_room()
        self._finish()

    def someone_left(self) -> None:
        """A rank has ended."""
        self._finish()

    def watch(self, now_s: float) -> bool:
        """Look at the copies under way; True while one of those that are waited for grows."""
        growing = False
        for seat, _ in self._survivors():
            if seat.rank in self.answers:
                continue
            count = self._pieces(seat)
            known, since_s = self._copied.get(seat.rank, (count, -math.inf))
            if known != count:
                since_s = now_s
            self._copied[seat.rank] = (count, since_s)
            growing = growing or now_s - since_s < STILL_S
        return growing

    def copy_s(self) -> float:
        """Return what a copy of the state takes on this member, 0 if nothing is known of it."""
        found = [read for seat, _ in self._survivors() if (read := self._read(seat)) is not None]
        return max(map(progress.copy_s, found), default=0.0)

    def _survivors(self) -> list[tuple[Worker, WorkerProcess]]:
        return live_workers(self._seats)

    def _make_room(self) -> None:
        """Who answered is not within a copy; the others may be."""
        if self.done:
            return
        answered = {seat for seat, _ in self._survivors() if seat.rank in self.answers}
        refused = [seat for seat in answered if self.answers[seat.rank].why == NO_ROOM]
        silent = [
            process
            for seat, process in self._survivors()
            if seat not in answered and (self._impatient or seat.rank in self._given_up)
        ]
        if refused and silent:
            for process in silent:
                process.kill(signal.SIGKILL)
            for seat in refused:
                del self.answers[seat.rank]
            self._ask(refused)

    def _ask(self, seats: Iterable[Worker]) -> None:
        asked = tuple(seats)
        self._asked |= {seat.rank for seat in asked}
        self._tell(asked)
        self._finish()

    def _tell(self, seats: Iterable[Worker]) -> None:
        for seat in seats:
            assert seat.process is not None
            try:
                order = WorkerOrder("secure", generation=self._generation)
                rank_channel.send(seat.process.control, order, wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def _finish(self) -> None:
        """Stop waiting once nobody who could still answer is left."""
        left = {seat.rank for seat, _ in self._survivors()}
        if self._asked and left <= self._asked and left <= self._given_up | self.answers.keys():
            self.done = True

    def _position(self, seat: Worker, process: WorkerProcess) -> int | None:
        """Return the step that this rank could give, None while it cannot run at all."""
        if not _runs(process):
            return None
        found = self._read(seat)
        return None if found is None else found.step + (found.write_seq & 1)

    def _pieces(self, seat: Worker) -> int:
        view = self._page(seat)
        if view is None:
            return 0
        with view:
            return progress.copied(view)

    def _page(self, seat: Worker) -> mmap.mmap | None:
        try:
            with (self._directory / member_directory.page_name(seat.local_rank)).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None

    def _read(self, seat: Worker) -> Progress | None:
        """Return what this rank's page says, None when it says nothing of this generation."""
        view = self._page(seat)
        if view is None:
            return None
        with view:
            found = progress.read(view)
        return found if found is not None and found.generation == self._generation else None


def _runs(process: WorkerProcess) -> bool:
    return not process.killed and linux.state_of(process.pid)[0] not in "TZXt"
