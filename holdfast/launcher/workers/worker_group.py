"""One generation's workers on one member, and whether each waits for a process, runs, or has ended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Literal

from holdfast.inspection import process_stats
from holdfast.inspection.liveness import Stops
from holdfast.launcher.workers.survivor_snapshot import SurvivorSnapshot
from holdfast.launcher.workers.warm_pool import MemberSettings
from holdfast.launcher.workers.worker_process import Worker, WorkerProcess, live_workers, reported_ending
from holdfast.process import gpu_assignment, logs
from holdfast.protocol import environment, foreign_text, rank_channel
from holdfast.protocol.drills import DRILLS, DrillName
from holdfast.protocol.launcher_messages import (
    Ending,
    FirstSignal,
    Launch,
    LauncherState,
    RankStart,
    RankState,
)
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder


class WorkerGroup:
    """The workers of the newest generation. `begin` kills the processes of older generations."""

    def __init__(self, settings: MemberSettings) -> None:
        self.settings = settings
        self.launch: Launch | None = None
        self.workers: tuple[Worker, ...] = ()
        self.dying: set[WorkerProcess] = set()
        self.securing = SurvivorSnapshot(settings.directory, 0, ())
        self._stops = Stops()
        self._first_failed: Worker | None = None  # the worker whose failure explains the other failures

    @property
    def generation(self) -> int:
        return self.launch.generation if self.launch else 0

    def state(self) -> LauncherState:
        ranks = tuple(
            RankState(
                rank=worker.rank,
                local_rank=worker.local_rank,
                pid=worker.process.pid if worker.process else 0,
                generation=self.generation,
                state=worker.phase,
                ending=worker.ending,
                flag=worker.flag,
                marks=worker.marks,
                note=worker.note,
                where=worker.where,
                stopped=worker.stopped and not worker.exited,
                left=worker.left,
            )
            for worker in self.workers
        )
        answers = self.securing.answers
        return LauncherState(
            pid=os.getpid(),
            generation=self.generation,
            ranks=ranks,
            parked=(),
            port=0,
            secure_asked=self.generation if self.securing.done else 0,
            secured=tuple(answers[rank] for rank in sorted(answers)),
        )

    def begin(self, launch: Launch, ranks: tuple[RankStart, ...]) -> None:
        """Kill what remains of the previous generation, and create a worker for each of `ranks`.

        No old process can write into the new generation. Killed processes run no more code, and survivors
        that were ordered to secure their state are frozen before their optimizer runs.
        """
        self.kill_all()
        self.dying |= {each.process for each in self.workers if each.process and not each.exited}
        self.launch, self._first_failed = launch, None
        self.workers = tuple(Worker(each.rank, each.local_rank, self._with_devices(each)) for each in ranks)
        self.securing.stop()
        self.securing = SurvivorSnapshot(self.settings.directory, launch.generation, self.workers)

    def _with_devices(self, rank: RankStart) -> RankStart:
        return replace(
            rank,
            devices=gpu_assignment.visible_devices(
                os.environ, rank.rank, rank.local_rank, self.settings.nproc
            ),
        )

    def waiting(self) -> tuple[Worker, ...]:
        """Return the workers that have no process yet."""
        return tuple(worker for worker in self.workers if worker.process is None and not worker.exited)

    def start(self, worker: Worker, process: WorkerProcess, descriptors: tuple[int, ...]) -> bool:
        """Start `worker` in a parked process. Return False if the process has died since it was parked."""
        order = WorkerOrder("start", self.launch, worker.rank_start, local_rank=worker.local_rank)
        try:
            rank_channel.send(process.control, order, descriptors)
        except rank_channel.Closed:
            return False
        worker.process = process
        return True

    def name_logs(self, workers: Iterable[Worker]) -> None:
        """Name the logs of `workers` after their ranks, now that they have started: storage may be slow."""
        folder = self.settings.logs / f"gen-{self.generation:04d}"
        for worker in workers:
            target, process = folder / f"rank-{worker.rank}.log", worker.process
            # If storage is full or has disappeared, the log keeps its original path.
            if process is not None and process.log != target and logs.moved(process.log, target):
                process.log = target

    def is_done(self) -> bool:
        """Return True if all ranks have succeeded. Processes that they left behind may then keep running."""
        ended = [worker.ending for worker in self.workers if worker.exited]
        return 0 < len(ended) == len(self.workers) and all(
            each is not None and each.is_good for each in ended
        )

    def print_line(self, text: str) -> None:
        """Append a line to the log of the first rank that has a process."""
        log = next((worker.process.log for worker in self.workers if worker.process is not None), None)
        if log is not None:
            with logs.opened(log) as out:
                out.write(f"holdfast: {text}\n".encode(errors="replace"))

    def not_started(self, worker: Worker, ended: Ending) -> None:
        """Record that no process can be created for `worker`."""
        self._note_ending(worker, ended)
        worker.exited = True
        self.securing.worker_left()

    def cold_environment(self, worker: Worker) -> dict[str, str]:
        """Return the environment of a rank that is started without a warm process."""
        assert self.launch is not None
        order = WorkerOrder("start", self.launch, worker.rank_start, local_rank=worker.local_rank)
        own = {
            environment.START: json.dumps(asdict(order)),
            environment.DIRECTORY: str(self.settings.directory),
            environment.NPROC: str(self.settings.nproc),
        }
        if worker.rank_start.devices:
            own[gpu_assignment.VISIBLE] = worker.rank_start.devices
        return {**os.environ, **environment.rank_environment(self.launch, worker.rank_start), **own}

    def receive(self, process: WorkerProcess, message: WorkerMessage) -> None:
        """Handle a message from the rank that `process` runs; ignore it if `process` runs no rank.

        Processes that the script forks inherit the channel. All messages except "left" are therefore ignored
        unless the rank itself sent them.
        """
        worker = next((each for each in self.workers if each.process is process), None)
        take = _HANDLERS.get(message.what)
        if worker is None or take is None:
            return
        if process.sent(message) or message.what in _FROM_ANY_PROCESS:
            take(self, worker, message)

    def _on_ending(self, worker: Worker, message: WorkerMessage) -> None:
        ending = reported_ending(worker.ending, message)
        if ending is None:
            worker.ending = None
        elif ending is not worker.ending:
            self._note_ending(worker, ending)
        if message.secured is not None:
            self.securing.note_copy(foreign_text.each(message.secured, self._words_bytes))
        elif message.what == "withdrawn":
            self.securing.forget_copy(worker.rank)

    def _on_marks(self, worker: Worker, message: WorkerMessage) -> None:
        if message.marks is not None:
            worker.marks = message.marks

    def _on_flag(self, worker: Worker, message: WorkerMessage) -> None:
        if message.flag is not None:
            worker.flag = foreign_text.each(message.flag, self._words_bytes)

    def _on_secured(self, _worker: Worker, message: WorkerMessage) -> None:
        if message.secured is not None:
            self.securing.receive(foreign_text.each(message.secured, self._words_bytes))

    def _on_note(self, worker: Worker, message: WorkerMessage) -> None:
        worker.note = foreign_text.shortened(message.note, self._words_bytes)

    def _on_where(self, worker: Worker, message: WorkerMessage) -> None:
        worker.where = foreign_text.shortened(message.where, self._words_bytes)

    def _on_left(self, worker: Worker, message: WorkerMessage) -> None:
        worker.left = foreign_text.shortened(message.note, self._words_bytes)

    @property
    def _words_bytes(self) -> int:
        return foreign_text.share(foreign_text.WORDS_BYTES, self.settings.nproc)

    def _note_ending(self, worker: Worker, ended: Ending) -> None:
        """Record how a rank ends. Keep the first failure's text whole, and cut the others to equal shares.

        The shares depend on the number of ranks in the whole group, so that the supervisor can keep the texts
        of all members. Even the smallest share has room for the end of a log, which shows that a rank is a
        victim.
        """
        before, worker.ending = self._first_failed, foreign_text.each(ended, foreign_text.WHOLE_BYTES)
        reported = [each for each in self.workers if each.ending is not None]
        self._first_failed = min(reported, key=_first_to_fail, default=worker)
        world_size = self.launch.world_size if self.launch is not None else self.settings.nproc
        most = min(
            foreign_text.share(foreign_text.ENDINGS_BYTES, self.settings.nproc),
            foreign_text.share(foreign_text.ENDINGS_BYTES, world_size, foreign_text.LEAST_BYTES),
        )
        for each in {worker, before} - {self._first_failed, None}:
            if each is not None and each.ending is not None:
                raised = foreign_text.shortened(each.ending.raised, most // 4)
                each.ending = foreign_text.each(replace(each.ending, raised=raised), most * 3 // 4)

    def process_ended(self, process: WorkerProcess, ended: Ending) -> None:
        """Record that `process` has exited and been reaped; `ended` is the result of `reap`."""
        self.dying.discard(process)
        for worker in self.workers:
            if worker.process is process:
                self._note_ending(worker, ended)
                worker.exited = True
                self.securing.worker_left()

    def ask_where(self) -> None:
        """Ask all live ranks what they are doing.

        The supervisor needs to know this, because it waits for a rank that is working, for example on an
        evaluation, but not for a rank that is waiting for a dead peer.
        """
        for _, process in live_workers(self.workers):
            try:
                rank_channel.send(process.control, WorkerOrder("where"), wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def detect_stops(self, now_s: float) -> None:
        """Determine which ranks a signal has stopped. This reads one small file in /proc for each rank."""
        pids = {process.pid: worker for worker, process in live_workers(self.workers)}
        stopped = self._stops.later([pid for pid in pids if process_stats.is_stopped(pid)], now_s)
        for pid, worker in pids.items():
            worker.stopped = pid in stopped

    def drill(self, local_rank: int, what: Literal[DrillName, ""]) -> None:
        """Carry out the drill `what` on a rank: send the rank a signal, or order it to execute the drill."""
        for worker, process in live_workers(self.workers):
            if worker.local_rank != local_rank:
                continue
            name = DRILLS[what].signal if what else ""
            if name:
                os.kill(process.pid, signal.Signals[name])
                continue
            try:
                rank_channel.send(process.control, WorkerOrder("drill", drill=what), wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def alive(self) -> bool:
        """Return whether a process of this or an older generation is alive."""
        return bool(live_workers(self.workers)) or bool(self.dying)

    def has(self, process: WorkerProcess) -> bool:
        return any(worker.process is process for worker in self.workers)

    def pids(self) -> set[int]:
        """Return the pids of this generation's processes, including those that have exited."""
        return {worker.process.pid for worker in self.workers if worker.process}

    def end(self, signum: int) -> None:
        """Signal all ranks, except those that have reported their ending and are running exit handlers."""
        for process in self._at_work():
            process.kill(signum)

    def ask_to_end(self, first: FirstSignal) -> None:
        """Send the same ranks SIGINT or SIGTERM, as a user would, according to `first` (`LauncherOrder`)."""
        for process in self._at_work():
            handled = first == "handled" and process_stats.catches(process.pid, signal.SIGTERM)
            process.kill(signal.SIGTERM if handled else signal.SIGINT)

    def _at_work(self) -> list[WorkerProcess]:
        found = live_workers(self.workers)
        return [process for worker, process in found if worker.ending is None or worker.ending.unwinding]

    def kill_all(self) -> None:
        for _, process in live_workers(self.workers):
            process.kill(9)


_HANDLERS: Mapping[str, Callable[[WorkerGroup, Worker, WorkerMessage], None]] = MappingProxyType(
    {  # by `WorkerMessage.what`; the process watch and the warm pool handle the remaining messages
        "failing": WorkerGroup._on_ending,
        "withdrawn": WorkerGroup._on_ending,
        "started": WorkerGroup._on_marks,
        "settled": WorkerGroup._on_marks,
        "flag": WorkerGroup._on_flag,
        "secured": WorkerGroup._on_secured,
        "note": WorkerGroup._on_note,
        "where": WorkerGroup._on_where,
        "left": WorkerGroup._on_left,
    }
)
_FROM_ANY_PROCESS = frozenset({"left"})  # the script may run in a process below the rank's own process


def _first_to_fail(worker: Worker) -> tuple[bool, int, int]:
    assert worker.ending is not None
    return *worker.ending.blame_order, worker.rank
