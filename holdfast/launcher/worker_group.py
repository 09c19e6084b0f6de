"""The ranks of one generation on one member: who runs, who waits for a process, how each ended."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace

from holdfast.inspection import process_stats
from holdfast.inspection.liveness import Stops
from holdfast.launcher.just_in_time import JustInTimeSnapshot
from holdfast.launcher.warm_pool import MemberSettings
from holdfast.launcher.worker_process import Worker, WorkerProcess, live_workers
from holdfast.process import gpu_assignment, logs
from holdfast.protocol import environment, foreign_text, rank_channel
from holdfast.protocol.launcher_messages import Ending, Launch, LauncherState, RankStart, RankState
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder


class WorkerGroup:
    """Seats of the newest generation. Processes of older ones are killed at `begin`."""

    def __init__(self, home: MemberSettings) -> None:
        self.home = home
        self.launch: Launch | None = None
        self.seats: tuple[Worker, ...] = ()
        self.dying: set[WorkerProcess] = set()
        self.securing = JustInTimeSnapshot(home.directory, 0, ())
        self._stops = Stops()
        self._first: Worker | None = None  # to fail, of those that say how they end

    @property
    def generation(self) -> int:
        return self.launch.generation if self.launch else 0

    def state(self) -> LauncherState:
        ranks = tuple(
            RankState(
                seat.rank,
                seat.local_rank,
                seat.process.pid if seat.process else 0,
                self.generation,
                seat.state,
                seat.ending,
                seat.flag,
                seat.marks,
                seat.note,
                seat.where,
                seat.stopped and not seat.exited,
                seat.left,
            )
            for seat in self.seats
        )
        answers = self.securing.answers
        secured = tuple(answers[rank] for rank in sorted(answers))
        done = self.generation if self.securing.done else 0
        return LauncherState(os.getpid(), self.generation, ranks, (), 0, done, secured)

    def begin(self, launch: Launch, ranks: tuple[RankStart, ...]) -> None:
        """Kill what is left of the generation before and seat the ranks of the new one.

        SIGKILL takes effect before any more of the old processes' code runs, and survivors that were
        asked to secure are frozen before their optimizer: nothing old writes into the new generation.
        """
        self.kill_all()
        self.dying |= {s.process for s in self.seats if s.process and not s.exited}
        self.launch, self._first = launch, None
        self.seats = tuple(Worker(each.rank, each.local_rank, self._with_devices(each)) for each in ranks)
        self.securing.stop()
        self.securing = JustInTimeSnapshot(self.home.directory, launch.generation, self.seats)

    def _with_devices(self, rank: RankStart) -> RankStart:
        return replace(
            rank, devices=gpu_assignment.share(os.environ, rank.rank, rank.local_rank, self.home.nproc)
        )

    def waiting(self) -> tuple[Worker, ...]:
        return tuple(seat for seat in self.seats if seat.process is None and not seat.exited)

    def start(self, seat: Worker, process: WorkerProcess, descriptors: tuple[int, ...]) -> bool:
        """Release a parked process into `seat`. False when it died meanwhile."""
        order = WorkerOrder("start", self.launch, seat.order, local_rank=seat.local_rank)
        try:
            rank_channel.send(process.control, order, descriptors)
        except rank_channel.Closed:
            return False
        self.take(seat, process)
        return True

    def take(self, seat: Worker, process: WorkerProcess) -> None:
        seat.process = process
        target = self.home.logs / f"gen-{self.generation:04d}" / f"rank-{seat.rank}.log"
        if logs.moved(process.log, target):  # storage that is full or away costs the log its place
            process.log = target

    def is_done(self) -> bool:
        """True when all ranks have ended, and well: what they left behind is not to be ended with them."""
        ended = [seat.ending for seat in self.seats if seat.exited]
        return 0 < len(ended) == len(self.seats) and all(each is not None and each.is_good for each in ended)

    def say(self, text: str) -> None:
        """Print a line among what the first rank has printed."""
        log = next((seat.process.log for seat in self.seats if seat.process is not None), None)
        if log is not None:
            with logs.opened(log) as out:
                out.write(f"holdfast: {text}\n".encode(errors="replace"))

    def unstarted(self, seat: Worker, ended: Ending) -> None:
        """Note that no process can be had for `seat`."""
        self._end(seat, ended)
        seat.exited = True
        self.securing.someone_left()

    def environment(self, seat: Worker) -> dict[str, str]:
        """Return the environment of a rank that no warm process carries."""
        assert self.launch is not None
        order = WorkerOrder("start", self.launch, seat.order, local_rank=seat.local_rank)
        mine = {
            environment.START: json.dumps(asdict(order)),
            environment.DIRECTORY: str(self.home.directory),
            environment.NPROC: str(self.home.nproc),
        }
        if seat.order.devices:
            mine[gpu_assignment.VISIBLE] = seat.order.devices
        return {**os.environ, **environment.rank_environment(self.launch, seat.order), **mine}

    def hear(self, process: WorkerProcess, said: WorkerMessage) -> None:
        seat = next((s for s in self.seats if s.process is process), None)
        if seat is not None and said.what == "left":  # also a script's whose command is another process
            seat.left = foreign_text.shortened(said.note, self._words_bytes)
        if seat is None or said.pid not in (0, process.pid):  # what the script forks holds the line as well
            return
        if said.what == "failing" and said.ending is not None:
            if seat.ending is None or seat.ending.unwinding:
                self._end(seat, said.ending)
        elif said.what == "withdrawn":
            if seat.ending is not None and seat.ending.unwinding:
                seat.ending = None
        elif said.what == "flag" and said.flag is not None:
            seat.flag = foreign_text.each(said.flag, self._words_bytes)
        elif said.marks is not None:
            seat.marks = said.marks
        elif said.what == "secured" and said.secured is not None:
            self.securing.hear(foreign_text.each(said.secured, self._words_bytes))
        elif said.what == "note":
            seat.note = foreign_text.shortened(said.note, self._words_bytes)
        elif said.what == "where":
            seat.where = foreign_text.shortened(said.where, self._words_bytes)

    @property
    def _words_bytes(self) -> int:
        return foreign_text.share(foreign_text.WORDS_BYTES, self.home.nproc)

    def _end(self, seat: Worker, ended: Ending) -> None:
        """Note how a rank ends. The text of the first that failed is kept whole, the others' in equal shares.

        The shares are those of all ranks of the group, so that the supervisor can keep what all members tell;
        they are not so small that the end of a log no longer shows that a rank is a victim.
        """
        before, seat.ending = self._first, foreign_text.each(ended, foreign_text.WHOLE_BYTES)
        told = [each for each in self.seats if each.ending is not None]
        self._first = min(told, key=_first_to_fail, default=seat)
        world_size = self.launch.world_size if self.launch is not None else self.home.nproc
        most = min(
            foreign_text.share(foreign_text.ENDINGS_BYTES, self.home.nproc),
            foreign_text.share(foreign_text.ENDINGS_BYTES, world_size, foreign_text.LEAST_BYTES),
        )
        for each in {seat, before} - {self._first, None}:
            if each is not None and each.ending is not None:
                raised = foreign_text.shortened(each.ending.raised, most // 4)
                each.ending = foreign_text.each(replace(each.ending, raised=raised), most * 3 // 4)

    def lose(self, process: WorkerProcess, ended: Ending) -> None:
        self.dying.discard(process)
        for seat in self.seats:
            if seat.process is process:
                told = seat.ending
                victim = (
                    told is not None and told.fail == "distributed" and not (told.unwinding or ended.ours)
                )
                if told is not None and ended.signal and not victim:  # a victim stays one, however it goes
                    told = replace(ended, paused=told.paused)
                elif told is not None and told.unwinding:
                    told = (
                        replace(told, unwinding=False, overdue=False, code=ended.code) if ended.code else None
                    )
                self._end(seat, told or ended)
                seat.exited = True
                self.securing.someone_left()

    def ask_where(self) -> None:
        """Ask all who live what they are doing: a wait for a dead peer is no work to be waited for."""
        for _, process in live_workers(self.seats):
            try:
                rank_channel.send(process.control, WorkerOrder("where"), wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def look_for_stops(self, now_s: float) -> None:
        """Find out who has been stopped by a signal. Cheap: one small file of /proc for each rank."""
        pids = {process.pid: seat for seat, process in live_workers(self.seats)}
        stopped = self._stops.later([pid for pid in pids if process_stats.is_stopped(pid)], now_s)
        for pid, seat in pids.items():
            seat.stopped = pid in stopped

    # -- ends

    def drill(self, local_rank: int, what: str) -> None:
        for seat, process in live_workers(self.seats):
            if seat.local_rank != local_rank:
                continue
            if what in ("kill", "stop"):
                os.kill(process.pid, 9 if what == "kill" else 19)
                continue
            try:
                rank_channel.send(process.control, WorkerOrder("drill", drill=what), wait=False)
            except (rank_channel.Closed, OSError):
                continue

    def alive(self) -> bool:
        return bool(live_workers(self.seats)) or bool(self.dying)

    def has(self, process: WorkerProcess) -> bool:
        return any(seat.process is process for seat in self.seats)

    def present(self) -> set[int]:
        """Return the pids of this generation's processes, those that have ended included."""
        return {seat.process.pid for seat in self.seats if seat.process}

    def end(self, signum: int) -> None:
        """Signal all but those that have said that they end: their exit handlers run."""
        for process in self._at_work():
            process.kill(signum)

    def ask(self, first: str) -> None:
        """Signal the same as a person does who wants an end: see `LauncherOrder`."""
        for process in self._at_work():
            handled = first == "handled" and process_stats.catches(process.pid, signal.SIGTERM)
            process.kill(signal.SIGTERM if handled else signal.SIGINT)

    def _at_work(self) -> list[WorkerProcess]:
        found = live_workers(self.seats)
        return [process for seat, process in found if seat.ending is None or seat.ending.unwinding]

    def kill_all(self) -> None:
        for _, process in live_workers(self.seats):
            process.kill(9)


def _first_to_fail(seat: Worker) -> tuple[bool, int, int]:
    """Order causes before their victims and what we ended ourselves, and the earlier before the later."""
    ended = seat.ending
    assert ended is not None
    other = ended.fail == "distributed" or ended.ours or ended.is_good
    return other, ended.failed_ns or ended.at_ns, seat.rank
