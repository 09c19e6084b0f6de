"""The workers of one generation on one member: which runs, which waits for a process, how each ended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType

from holdfast.inspection import process_stats
from holdfast.inspection.liveness import Stops
from holdfast.launcher.survivor_snapshot import SurvivorSnapshot
from holdfast.launcher.warm_pool import MemberSettings
from holdfast.launcher.worker_process import Worker, WorkerProcess, live_workers
from holdfast.process import gpu_assignment, logs
from holdfast.protocol import environment, foreign_text, rank_channel
from holdfast.protocol.launcher_messages import Ending, Launch, LauncherState, RankStart, RankState
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder


class WorkerGroup:
    """The workers of the newest generation. Processes of older ones are killed at `begin`."""

    def __init__(self, settings: MemberSettings) -> None:
        self.settings = settings
        self.launch: Launch | None = None
        self.workers: tuple[Worker, ...] = ()
        self.dying: set[WorkerProcess] = set()
        self.securing = SurvivorSnapshot(settings.directory, 0, ())
        self._stops = Stops()
        self._first_failed: Worker | None = None  # of those that have reported how they end

    @property
    def generation(self) -> int:
        return self.launch.generation if self.launch else 0

    def state(self) -> LauncherState:
        ranks = tuple(
            RankState(
                worker.rank,
                worker.local_rank,
                worker.process.pid if worker.process else 0,
                self.generation,
                worker.state,
                worker.ending,
                worker.flag,
                worker.marks,
                worker.note,
                worker.where,
                worker.stopped and not worker.exited,
                worker.left,
            )
            for worker in self.workers
        )
        answers = self.securing.answers
        secured = tuple(answers[rank] for rank in sorted(answers))
        done = self.generation if self.securing.done else 0
        return LauncherState(os.getpid(), self.generation, ranks, (), 0, done, secured)

    def begin(self, launch: Launch, ranks: tuple[RankStart, ...]) -> None:
        """Kill what is left of the generation before, and make a worker for each rank of the new one.

        SIGKILL takes effect before any more of the old processes' code runs, and survivors that were
        asked to secure are frozen before their optimizer: nothing old writes into the new generation.
        """
        self.kill_all()
        self.dying |= {each.process for each in self.workers if each.process and not each.exited}
        self.launch, self._first_failed = launch, None
        self.workers = tuple(Worker(each.rank, each.local_rank, self._with_devices(each)) for each in ranks)
        self.securing.stop()
        self.securing = SurvivorSnapshot(self.settings.directory, launch.generation, self.workers)

    def _with_devices(self, rank: RankStart) -> RankStart:
        return replace(
            rank, devices=gpu_assignment.share(os.environ, rank.rank, rank.local_rank, self.settings.nproc)
        )

    def waiting(self) -> tuple[Worker, ...]:
        """Return the workers that have no process yet."""
        return tuple(worker for worker in self.workers if worker.process is None and not worker.exited)

    def start(self, worker: Worker, process: WorkerProcess, descriptors: tuple[int, ...]) -> bool:
        """Release a parked process to run `worker`. False when it has died since it was parked."""
        order = WorkerOrder("start", self.launch, worker.order, local_rank=worker.local_rank)
        try:
            rank_channel.send(process.control, order, descriptors)
        except rank_channel.Closed:
            return False
        self.assign(worker, process)
        return True

    def assign(self, worker: Worker, process: WorkerProcess) -> None:
        """Note that `process` runs `worker`, and give its log the name of the rank."""
        worker.process = process
        target = self.settings.logs / f"gen-{self.generation:04d}" / f"rank-{worker.rank}.log"
        if logs.moved(process.log, target):  # storage that is full or away costs the log its place
            process.log = target

    def is_done(self) -> bool:
        """True when all ranks have ended, and well: processes that they left behind may then run on."""
        ended = [worker.ending for worker in self.workers if worker.exited]
        return 0 < len(ended) == len(self.workers) and all(
            each is not None and each.is_good for each in ended
        )

    def print_line(self, text: str) -> None:
        """Print a line into the log of the first rank that has a process."""
        log = next((worker.process.log for worker in self.workers if worker.process is not None), None)
        if log is not None:
            with logs.opened(log) as out:
                out.write(f"holdfast: {text}\n".encode(errors="replace"))

    def not_started(self, worker: Worker, ended: Ending) -> None:
        """Note that no process can be made for `worker`."""
        self._note_ending(worker, ended)
        worker.exited = True
        self.securing.worker_left()

    def cold_environment(self, worker: Worker) -> dict[str, str]:
        """Return the environment of a rank that is started without a warm process."""
        assert self.launch is not None
        order = WorkerOrder("start", self.launch, worker.order, local_rank=worker.local_rank)
        own = {
            environment.START: json.dumps(asdict(order)),
            environment.DIRECTORY: str(self.settings.directory),
            environment.NPROC: str(self.settings.nproc),
        }
        if worker.order.devices:
            own[gpu_assignment.VISIBLE] = worker.order.devices
        return {**os.environ, **environment.rank_environment(self.launch, worker.order), **own}

    def receive(self, process: WorkerProcess, message: WorkerMessage) -> None:
        """Take a message of the rank that `process` runs. One of a process without a rank changes nothing.

        What the script forks has the channel as well, so all messages but "left" count only from the rank
        itself.
        """
        worker = next((each for each in self.workers if each.process is process), None)
        take = _HANDLERS.get(message.what)
        if worker is None or take is None:
            return
        if message.pid in (0, process.pid) or message.what in _FROM_ANY_PROCESS:
            take(self, worker, message)

    def _take_failing(self, worker: Worker, message: WorkerMessage) -> None:
        if message.ending is not None and (worker.ending is None or worker.ending.unwinding):
            self._note_ending(worker, message.ending)

    def _take_withdrawn(self, worker: Worker, _message: WorkerMessage) -> None:
        if worker.ending is not None and worker.ending.unwinding:
            worker.ending = None

    def _take_marks(self, worker: Worker, message: WorkerMessage) -> None:
        if message.marks is not None:
            worker.marks = message.marks

    def _take_flag(self, worker: Worker, message: WorkerMessage) -> None:
        if message.flag is not None:
            worker.flag = foreign_text.each(message.flag, self._words_bytes)

    def _take_secured(self, _worker: Worker, message: WorkerMessage) -> None:
        if message.secured is not None:
            self.securing.receive(foreign_text.each(message.secured, self._words_bytes))

    def _take_note(self, worker: Worker, message: WorkerMessage) -> None:
        worker.note = foreign_text.shortened(message.note, self._words_bytes)

    def _take_where(self, worker: Worker, message: WorkerMessage) -> None:
        worker.where = foreign_text.shortened(message.where, self._words_bytes)

    def _take_left(self, worker: Worker, message: WorkerMessage) -> None:
        worker.left = foreign_text.shortened(message.note, self._words_bytes)

    @property
    def _words_bytes(self) -> int:
        return foreign_text.share(foreign_text.WORDS_BYTES, self.settings.nproc)

    def _note_ending(self, worker: Worker, ended: Ending) -> None:
        """Note how a rank ends. The text of the first that failed is kept whole, the others' in equal shares.

        The shares are those of all ranks of the group, so that the supervisor can keep the texts of all
        members; they are not so small that the end of a log no longer shows that a rank is a victim.
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
        """Note that `process` has ended and is collected; `ended` is how, as the launcher knows it."""
        self.dying.discard(process)
        for worker in self.workers:
            if worker.process is process:
                self._note_ending(worker, _final_ending(worker.ending, ended))
                worker.exited = True
                self.securing.worker_left()

    def ask_where(self) -> None:
        """Ask all live ranks what they do: a wait for a dead peer is no work to wait for."""
        for _, process in live_workers(self.workers):
            try:
                rank_channel.send(process.control, WorkerOrder("where"), wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def look_for_stops(self, now_s: float) -> None:
        """Find out which ranks a signal has stopped. Cheap: one small file of /proc for each rank."""
        pids = {process.pid: worker for worker, process in live_workers(self.workers)}
        stopped = self._stops.later([pid for pid in pids if process_stats.is_stopped(pid)], now_s)
        for pid, worker in pids.items():
            worker.stopped = pid in stopped

    def drill(self, local_rank: int, what: str) -> None:
        """Cause the fault `what` in a rank: "kill" and "stop" by a signal, others by an order to it."""
        for worker, process in live_workers(self.workers):
            if worker.local_rank != local_rank:
                continue
            if what in ("kill", "stop"):
                os.kill(process.pid, 9 if what == "kill" else 19)
                continue
            try:
                rank_channel.send(process.control, WorkerOrder("drill", drill=what), wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def alive(self) -> bool:
        """True while a process of this or of an older generation lives."""
        return bool(live_workers(self.workers)) or bool(self.dying)

    def has(self, process: WorkerProcess) -> bool:
        return any(worker.process is process for worker in self.workers)

    def pids(self) -> set[int]:
        """Return the pids of this generation's processes, those that have ended included."""
        return {worker.process.pid for worker in self.workers if worker.process}

    def end(self, signum: int) -> None:
        """Signal all ranks but those that have reported that they end: their exit handlers run."""
        for process in self._at_work():
            process.kill(signum)

    def ask_to_end(self, first: str) -> None:
        """Signal the same ranks as a user does who wants them to end: see `LauncherOrder`."""
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
    {  # by `WorkerMessage.what`; the warm pool handles the others
        "failing": WorkerGroup._take_failing,
        "withdrawn": WorkerGroup._take_withdrawn,
        "started": WorkerGroup._take_marks,
        "settled": WorkerGroup._take_marks,
        "flag": WorkerGroup._take_flag,
        "secured": WorkerGroup._take_secured,
        "note": WorkerGroup._take_note,
        "where": WorkerGroup._take_where,
        "left": WorkerGroup._take_left,
    }
)
_FROM_ANY_PROCESS = frozenset({"left"})  # the command of a rank may be another process than its script


def _final_ending(reported: Ending | None, ended: Ending) -> Ending:
    """Return how a rank has ended, from what it has `reported` itself and how its process `ended`.

    A signal says more than what the rank reported before it, unless the rank lost its peers: a victim stays a
    victim, however its process ends. Code that was only unwinding has ended with the exit code, or has not
    failed.
    """
    if reported is None:
        return ended
    is_victim = reported.fail == "distributed" and not (reported.unwinding or ended.ours)
    if ended.signal and not is_victim:
        return replace(ended, paused=reported.paused)
    if reported.unwinding:
        return replace(reported, unwinding=False, overdue=False, code=ended.code) if ended.code else ended
    return reported


def _first_to_fail(worker: Worker) -> tuple[bool, int, int]:
    """Order causes before their victims and what this launcher ended, and the earlier before the later."""
    ended = worker.ending
    assert ended is not None
    other = ended.fail == "distributed" or ended.ours or ended.is_good
    return other, ended.failed_ns or ended.at_ns, worker.rank
