"""Make the survivors on one member copy their state: decide which ranks to ask and which to wait for.

One complete copy is enough. A rank that copies its state holds the arena's only free slot. Its copy may stall
if a signal has stopped the rank, or if its main thread starves the copying thread. It would then block all
others, so it is killed; its generation has ended anyway. A rank is never killed while its copy keeps growing,
no matter how long the copy takes.
"""

from __future__ import annotations

import math
import mmap
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from holdfast.launcher.workers.worker_process import Worker, WorkerProcess, live_workers
from holdfast.process import linux
from holdfast.protocol import progress, rank_channel
from holdfast.protocol.launcher_messages import NO_ROOM, SecureAnswer
from holdfast.protocol.progress import Progress
from holdfast.protocol.rank_channel import WorkerOrder
from holdfast.snapshot import member_directory

NO_GROWTH_S = 0.5  # a copy that has not grown for this long is treated as stalled
SECURE_S = 1.0  # how long to wait for survivors' copies; a longer wait would slow the recovery
SECURE_FIRST_S = 0.15  # how long to wait for the ranks at the lowest step before asking the others too
SECURE_SUSPECT_S = 0.25  # how long to wait for ranks that may hang; others answer in a tenth of this time
SECURE_WATCH_S = 0.1  # the time between two checks of the copies in progress
# If a rank needs a slot, a silent rank that may hold one is killed after this time.
SECURE_STUCK_S = 0.6

# Calls a function once on the launcher's loop, after this many seconds.
_Schedule: TypeAlias = Callable[[float, Callable[[], None]], None]


class SurvivorSnapshot:
    """One attempt to copy the state of a generation. Answers that arrive after `done` is set are ignored."""

    def __init__(self, directory: Path, generation: int, workers: tuple[Worker, ...]) -> None:
        """`directory` contains the ranks' progress pages."""
        self.done = False
        self.answers: dict[int, SecureAnswer] = {}
        self._directory = directory
        self._generation = generation
        self._workers = workers
        self._asked: set[int] = set()
        self._given_up: set[int] = set()
        self._impatient = False
        self._copy = True
        # For each rank: the number of pieces that it has copied, and when this number last changed.
        self._copied: dict[int, tuple[int, float]] = {}
        self._early: dict[int, SecureAnswer] = {}  # by rank: answers that ranks gave before they were asked

    def begin(self, copy: bool = True) -> bool:
        """Ask the ranks at the lowest step to copy their state, because all ranks can resume from that step.

        If `copy` is False, the state is unusable, and the ranks are only asked not to take another step.
        Ranks that a signal has stopped are killed, because they cannot answer. A rank whose optimizer is
        writing has already stored its private state for the step in progress, so it is treated as one step
        ahead. Returns False if the copying has already begun.
        """
        if self.done or self._asked:
            return False
        self._copy = copy
        for _, process in self._survivors():
            if linux.state_of(process.pid)[0] == "T":
                process.kill(signal.SIGKILL)
        steps = {worker: self._position(worker, process) for worker, process in self._survivors()}
        able = {worker: step for worker, step in steps.items() if step is not None}
        # A rank that has just started has no state worth waiting for, but it must not take a step either.
        self._send_order(
            worker for worker, process in self._survivors() if worker not in able and _runs(process)
        )
        if able:
            lowest = min(able.values())
            self._ask(worker for worker, step in able.items() if step == lowest or not copy)
            for early in [self._early[rank] for rank in self._asked & self._early.keys()]:
                if copy and early.step == lowest:
                    self.receive(early)
        else:
            self.done = True
        return True

    def ask_rest(self) -> None:
        """Ask the ranks that have not been asked yet."""
        if not self.done:
            self._ask(worker for worker, _ in self._survivors() if worker.rank not in self._asked)

    def give_up(self, ranks: Iterable[int]) -> None:
        """Stop waiting for `ranks`, which hang. Kill them if another rank needs a slot that they may hold."""
        self._given_up |= set(ranks)
        self._make_room()
        self._finish()

    def give_up_silent(self) -> None:
        """From now on, kill all ranks that have not answered if another rank finds no free slot."""
        self._impatient = True
        self._make_room()

    def stop(self) -> None:
        """Stop waiting for any rank."""
        self.done = True

    def receive(self, answer: SecureAnswer) -> None:
        """Record a rank's answer. A complete copy ends the wait."""
        self.answers[answer.rank] = answer
        self.done = self.done or answer.whole
        self._make_room()
        self._finish()

    def note_copy(self, answer: SecureAnswer) -> None:
        """Record the answer of a rank that is about to end. If it copied its state, no rank is waited for.

        If the rank has not been asked yet, its answer counts once it is asked, if its step is the lowest.
        """
        if not answer.whole:
            return
        if answer.rank in self._asked:
            self.receive(answer)
        else:
            self._early[answer.rank] = answer

    def forget_copy(self, rank: int) -> None:
        """Forget the early answer of a rank that does not end after all, and may take further steps."""
        self._early.pop(rank, None)

    def worker_left(self) -> None:
        """End the wait if no remaining rank can answer. Must be called when a rank has ended."""
        self._finish()

    def watch(self, now_s: float) -> bool:
        """Check the copies in progress. Return True while a rank that has not answered is still copying."""
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
        """Return how many seconds a copy of the state takes on this member; 0 if unknown."""
        found = [read for worker, _ in self._survivors() if (read := self._read(worker)) is not None]
        return max(map(progress.copy_s, found), default=0.0)

    def _survivors(self) -> list[tuple[Worker, WorkerProcess]]:
        return live_workers(self._workers)

    def _make_room(self) -> None:
        """If a rank found no free slot, kill the abandoned ranks that may hold one, and ask the rank again.

        Any rank that has not answered may be copying and hold a slot.
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
        """Stop waiting once no remaining rank can still answer."""
        left = {worker.rank for worker, _ in self._survivors()}
        if self._asked and left <= self._asked and left <= self._given_up | self.answers.keys():
            self.done = True

    def _position(self, worker: Worker, process: WorkerProcess) -> int | None:
        """Return the step whose state this rank could copy; None if it is stopped or has just started."""
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
        """Return this rank's progress page; None if it belongs to another generation.

        On a busy machine, the rank may be preempted while it writes to its page. Even then, its state is
        intact.
        """
        view = self._page(worker)
        if view is None:
            return None
        with view:
            found = progress.read(view) or progress.read_torn_ok(view)
        return found if found is not None and found.generation == self._generation else None


def secure(securing: SurvivorSnapshot, suspects: Iterable[int], after: _Schedule, *, copy: bool) -> None:
    """Begin to secure the state, and schedule how long to wait for which ranks. Further calls do nothing.

    `suspects` are ranks that hang. For `copy`, see `SurvivorSnapshot.begin`.
    """
    if not securing.begin(copy):
        return
    more_s = progress.COPIES * securing.copy_s()
    _watch(securing, after)
    after(SECURE_FIRST_S, securing.ask_rest)
    _when_still(SECURE_SUSPECT_S + more_s, securing, after, lambda: securing.give_up(suspects))
    _when_still(SECURE_STUCK_S + more_s, securing, after, securing.give_up_silent)
    _when_still(SECURE_S + more_s, securing, after, securing.stop)


def _watch(securing: SurvivorSnapshot, after: _Schedule) -> None:
    if not securing.done:
        securing.watch(time.monotonic())
        after(SECURE_WATCH_S, lambda: _watch(securing, after))


def _when_still(
    seconds: float, securing: SurvivorSnapshot, after: _Schedule, act: Callable[[], None]
) -> None:
    """Call `act` after `seconds`, or later, once no copy is growing."""

    def due() -> None:
        if not securing.done and securing.watch(time.monotonic()):
            after(SECURE_WATCH_S, due)
        else:
            act()

    after(seconds, due)


def _runs(process: WorkerProcess) -> bool:
    return not process.killed and linux.state_of(process.pid)[0] not in "TZXt"
